"""The sparse half of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera import _C
from tessera.sparse._bags import Bags
from tessera.sparse._jagged import JaggedTensor, jt_of, jts_of
from tessera.sparse._traced import (
    as_node,
    cut,
    is_traced,
    proxy_in,
    sizes_of,
)

_Engine = _C.jagged.KeyedJaggedTensor

Inverse = tuple[Sequence[str], Tensor]
Strides = Tensor | Sequence[Sequence[int]]


class KeyedJaggedTensor(Bags):
    """Hold the sparse half of a batch: many features, each with a bag of ids per sample.

    Values lie key by key, in a key sample by sample. Strides, lengths per key and the like are computed
    when they are asked for; arguments that carry them are accepted and not read, except `length_per_key`.

    Its tensors are attributes, and inside torch.compile, torch.export and torch.jit.trace its methods are
    torch's operators; outside the engine computes.

    >>> import torch
    >>> kjt = KeyedJaggedTensor.from_lengths_sync(
    ...     ["a", "b"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 0, 1]))
    >>> kjt.stride(), kjt.length_per_key()
    (2, [2, 1])
    >>> kjt["b"].values().tolist()
    [3]
    >>> kjt.permute([1, 0]).keys()
    ['b', 'a']
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Sequence[int] | None = None,
        lengths_offset_per_key: Sequence[int] | None = None,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: Inverse | None = None,
    ) -> None:
        if is_traced(values):
            strides = stride_per_key_per_rank
            rows = strides.tolist() if isinstance(strides, Tensor) else strides
            self._take(list(keys), values, weights, lengths, offsets, stride, rows, inverse_indices)
            return
        self._hold(
            _Engine(
                keys,
                values,
                weights,
                lengths,
                offsets,
                stride,
                stride_per_key_per_rank,
                None,
                length_per_key,
                inverse_indices=inverse_indices,
            )
        )

    def _take(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int | None,
        strides: Sequence[Sequence[int]] | None,
        inverse: Inverse | None,
    ) -> None:
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._stride = stride
        self._strides = strides
        self._inverse = inverse
        self._held: Any = None

    def _hold(self, engine: Any) -> None:
        keys = engine.keys()
        self._take(
            keys,
            engine.values(),
            engine.weights_or_none(),
            engine.lengths_or_none(),
            engine.offsets_or_none(),
            None if keys else engine.stride(),
            engine.stride_per_key_per_rank() if engine.variable_stride_per_key() else None,
            engine.inverse_indices_or_none(),
        )
        self._held = engine

    def _engine(self) -> Any:
        """Return what the engine takes."""
        if self._held is None:
            self._held = _Engine(
                self._keys,
                self._values,
                self._weights,
                self._lengths,
                self._offsets,
                self._stride,
                self._strides,
                inverse_indices=self._inverse,
            )
        return self._held

    # ---- made of other things ----

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        inverse_indices: Inverse | None = None,
    ) -> KeyedJaggedTensor:
        """Return a batch, with what is needed per key computed now (on CUDA the host waits)."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        inverse_indices: Inverse | None = None,
    ) -> KeyedJaggedTensor:
        """Return the same, from where the bags begin."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Put features together; the batch is variable if their batches differ. All weighted or none."""
        if proxy_in(jt_dict) is not None:
            return as_node(KeyedJaggedTensor.from_jt_dict, jt_dict)
        features = list(jt_dict.values())
        if not features or not is_traced(features[0].values()):
            return kjt_of(_Engine.from_jt_dict({key: jt._engine() for key, jt in jt_dict.items()}))
        sizes = [jt.lengths().shape[0] for jt in features]
        is_weighted = features[0].weights_or_none() is not None
        return KeyedJaggedTensor(
            list(jt_dict),
            torch.cat([jt.values() for jt in features]),
            torch.cat([jt.weights() for jt in features]) if is_weighted else None,
            torch.cat([jt.lengths() for jt in features]),
            stride_per_key_per_rank=None
            if all(size == sizes[0] for size in sizes)
            else [[size] for size in sizes],
        )

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Put keys after keys. All weighted or none, all of variable batch or none."""
        if proxy_in(kjt_list) is not None:
            return as_node(KeyedJaggedTensor.concat, kjt_list)
        if not len(kjt_list) or not is_traced(kjt_list[0]._values):
            return kjt_of(_Engine.concat([kjt._engine() for kjt in kjt_list]))
        first = kjt_list[0]
        is_variable = first._strides is not None
        return KeyedJaggedTensor(
            [key for kjt in kjt_list for key in kjt._keys],
            torch.cat([kjt._values for kjt in kjt_list]),
            None if first._weights is None else torch.cat([kjt.weights() for kjt in kjt_list]),
            torch.cat([kjt.lengths().reshape(-1) for kjt in kjt_list]),
            stride_per_key_per_rank=[list(row) for kjt in kjt_list for row in kjt._strides]
            if is_variable
            else None,
            inverse_indices=None
            if first._inverse is None
            else (
                [name for kjt in kjt_list for name in kjt._inverse[0]],
                torch.cat([kjt._inverse[1] for kjt in kjt_list]),
            ),
        )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """Return a batch without keys."""
        return kjt_of(_Engine.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype))

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return a batch without keys, with the stride, types and device of `kjt`."""
        return kjt_of(_Engine.empty_like(kjt._engine()))

    @staticmethod
    def dist_init(
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: Sequence[int] | None,
        stagger: int = 1,
    ) -> KeyedJaggedTensor:
        """Return what a rank holds after an exchange: per key, the samples of rank 0, then of rank 1, ..."""
        return kjt_of(
            _Engine.dist_init(
                keys, tensors, variable_stride_per_key, num_workers, recat, stride_per_rank, stagger
            )
        )

    # ---- what it holds ----

    def keys(self) -> list[str]:
        """Return the names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """Return the values: key by key, in a key sample by sample."""
        return self._values

    def stride(self) -> int:
        """Return the batch size. Variable batch: that of the inverse indices, or the largest of all keys."""
        if not is_traced(self._values):
            return self._engine().stride()
        if self._inverse is not None:
            return self._inverse[1].shape[1]
        if self._strides is not None:
            return max([sum(row) for row in self._strides], default=0)
        if not self._keys:
            return self._stride or 0
        bags = self._offsets.numel() - 1 if self._lengths is None else self._lengths.numel()
        return bags // len(self._keys)

    def stride_per_key(self) -> list[int]:
        """Return the number of samples of each key."""
        if not is_traced(self._values):
            return self._engine().stride_per_key()
        if self._strides is not None:
            return [sum(row) for row in self._strides]
        return [self.stride()] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the samples of each key from each rank; nothing unless the batch is variable."""
        return [] if self._strides is None else [list(row) for row in self._strides]

    def variable_stride_per_key(self) -> bool:
        """Return whether every key has a batch of its own."""
        return self._strides is not None

    def inverse_indices(self) -> Inverse:
        """Return which of a key's samples each sample uses; ValueError if there are none."""
        if self._inverse is None:
            return self._engine().inverse_indices()
        return self._inverse

    def inverse_indices_or_none(self) -> Inverse | None:
        """Return the inverse indices, if there are any."""
        return self._inverse

    def length_per_key(self) -> list[int]:
        """Return the number of elements of each key."""
        if not is_traced(self._values):
            return self._engine().length_per_key()
        if not self._keys:
            return []
        lengths = self.lengths()
        if self._strides is None:
            return sizes_of(lengths.reshape(len(self._keys), self.stride()).sum(1))
        parts = cut(lengths, self.stride_per_key())
        return sizes_of(torch.stack([part.sum() for part in parts]))

    def length_per_key_or_none(self) -> list[int] | None:
        """Return the same, if it has been computed."""
        return self._engine().length_per_key_or_none()

    def offset_per_key(self) -> list[int]:
        """Return where each key begins in the values, and where the last one ends."""
        if not is_traced(self._values):
            return self._engine().offset_per_key()
        return _added_up(self.length_per_key())

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return the same, if it has been computed."""
        return self._engine().offset_per_key_or_none()

    def lengths_offset_per_key(self) -> list[int]:
        """Return where each key begins in the lengths, and where the last one ends."""
        return _added_up(self.stride_per_key())

    def index_per_key(self) -> dict[str, int]:
        """Return the place of each key."""
        return {key: place for place, key in enumerate(self._keys)}

    def sync(self) -> KeyedJaggedTensor:
        """Compute the lengths per key now."""
        if not is_traced(self._values):
            self._engine().sync()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Forget them."""
        if not is_traced(self._values):
            self._engine().unsync()
        return self

    # ---- parts ----

    def _features(self) -> list[JaggedTensor]:
        """Return the features in order, where torch is tracing."""
        sizes = self.length_per_key()
        values = cut(self._values, sizes)
        weights = None if self._weights is None else cut(self._weights, sizes)
        lengths = cut(self.lengths().reshape(-1), self.stride_per_key())
        return [
            JaggedTensor(values[place], None if weights is None else weights[place], lengths[place])
            for place in range(len(self._keys))
        ]

    def __getitem__(self, key: str) -> JaggedTensor:
        if not is_traced(self._values):
            return jt_of(self._engine()[key])
        return self.to_dict()[key]

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return the features by key."""
        if not is_traced(self._values):
            return jts_of(self._engine().to_dict())
        return dict(zip(self._keys, self._features(), strict=True))

    def _some(self, places: list[int]) -> KeyedJaggedTensor:
        """Return the features at these places, where torch is tracing."""
        features = self._features()
        chosen = [features[place] for place in places]
        is_weighted = self._weights is not None
        return KeyedJaggedTensor(
            [self._keys[place] for place in places],
            torch.cat([jt._values for jt in chosen]) if chosen else self._values[:0],
            (torch.cat([jt._weights for jt in chosen]) if chosen else self._weights[:0])
            if is_weighted
            else None,
            torch.cat([jt._lengths for jt in chosen]) if chosen else self.lengths().reshape(-1)[:0],
            stride=None if chosen else self.stride(),
            stride_per_key_per_rank=None
            if self._strides is None
            else [list(self._strides[place]) for place in places],
        )

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Cut by numbers of keys. A segment with all keys is this batch; one of 0 keys keeps the stride."""
        if is_traced(self._values):
            ends = _added_up(segments)
            return [
                self if end - begin == len(self._keys) else self._some(list(range(begin, end)))
                for begin, end in itertools.pairwise(ends)
            ]
        whole = self._engine()
        return [self if part is whole else kjt_of(part) for part in whole.split(segments)]

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """Return the keys `indices[0]`, `indices[1]`, ...; repeats and subsets are allowed."""
        if is_traced(self._values):
            return self._some(list(indices))
        return kjt_of(self._engine().permute(indices))

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Return the same with lengths of one dimension."""
        if is_traced(self._values):
            return self._with(self._weights, self.lengths().reshape(-1))
        return kjt_of(self._engine().flatten_lengths())

    def with_weights(self, weights: Tensor | None) -> KeyedJaggedTensor:
        """Return the same ids with other weights."""
        if is_traced(self._values):
            return self._with(weights, self._lengths)
        return kjt_of(self._engine().with_weights(weights))

    def _with(self, weights: Tensor | None, lengths: Tensor | None) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            self._keys,
            self._values,
            weights,
            lengths,
            self._offsets,
            self._stride,
            self._strides,
            inverse_indices=self._inverse,
        )

    # ---- other places ----

    def to(
        self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """Return the batch on `device`, with weights of `dtype`."""
        if not is_traced(self._values):
            return kjt_of(self._engine().to(device, non_blocking, dtype))

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        weights = moved(self._weights)
        return KeyedJaggedTensor(
            self._keys,
            moved(self._values),
            weights if weights is None or dtype is None else weights.to(dtype),
            moved(self._lengths),
            moved(self._offsets),
            self._stride,
            self._strides,
            inverse_indices=None if self._inverse is None else (self._inverse[0], moved(self._inverse[1])),
        )

    def dist_labels(self) -> list[str]:
        """Return what travels in an exchange of keys between ranks."""
        return self._engine().dist_labels()

    def dist_splits(self, key_splits: Sequence[int]) -> list[list[int]]:
        """Return the rows of each tensor for each destination, which gets `key_splits[d]` keys."""
        return self._engine().dist_splits(key_splits)

    def dist_tensors(self) -> list[Tensor]:
        """Return the tensors that travel."""
        return self._engine().dist_tensors()


KeyedJaggedTensor.__module__ = "tessera.sparse.jagged_tensor"


def _added_up(sizes: Sequence[int]) -> list[int]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends


def kjt_of(engine: Any) -> KeyedJaggedTensor:
    """Return what the engine gave as the class that users know."""
    return KeyedJaggedTensor._of(engine)
