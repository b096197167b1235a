"""The classes of jagged batches in the language of torch.jit.script.

torch.jit.script reads the source of a class and compiles every method. The engine behind the public classes
cannot be read so; these classes can, and stand for them: same names, same arguments, the same attributes, out
of torch's operators alone. A program that was scripted and saved runs wherever LibTorch does.

Nothing here is called from Python. `register` compiles the classes when torch.jit.script first asks for one,
and tells it that they are the public ones: batches then go into a script and come out of it as what users
know.
"""

# torch.jit reads types by these names; a class that is being compiled is found in no others.
# ruff: noqa: UP006, UP007, UP035, UP045, B905, RUF005

from __future__ import annotations

import builtins
import sys
from typing import Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor


def offsets_of(lengths: Tensor) -> Tensor:
    """Return where bags of these lengths begin, and where the last one ends."""
    ends = torch.cumsum(lengths.reshape(-1), 0).to(lengths.dtype)
    return torch.cat([torch.zeros(1, dtype=lengths.dtype, device=lengths.device), ends])


def numbers_of(counts: Tensor) -> List[int]:
    """Return a tensor of one dimension as numbers."""
    numbers: List[int] = counts.to(torch.int64).tolist()
    return numbers


def added_up(sizes: List[int]) -> List[int]:
    """Return where parts of these sizes begin, and where the last one ends."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends


def sums_of(rows: List[List[int]]) -> List[int]:
    """Return the sum of each row."""
    sums: List[int] = []
    for row in rows:
        total = 0
        for size in row:
            total += size
        sums.append(total)
    return sums


def padded(values: Tensor, lengths: Tensor, offsets: Tensor, size: int, padding: float) -> Tensor:
    """Return [bags, size, ...]: the first values of each bag, filled up."""
    last = torch.full([1] + values.shape[1:], padding, dtype=values.dtype, device=values.device)
    places = torch.arange(size, device=values.device)
    rows = offsets[:-1].unsqueeze(1) + places
    rows = torch.where(places < lengths.unsqueeze(1), rows, torch.full_like(rows, values.shape[0]))
    return torch.cat([values, last])[rows]


def text_of(values: Tensor, offsets: List[int]) -> str:
    """Return the values of each bag as a text."""
    bags: List[str] = []
    for place in range(len(offsets) - 1):
        bag = values[offsets[place] : offsets[place + 1]]
        if bag.dim() > 1:
            bags.append(str(bag))
        elif bag.is_floating_point():
            numbers: List[float] = bag.to(torch.float64).tolist()
            bags.append(str(numbers))
        else:
            whole: List[int] = bag.to(torch.int64).tolist()
            bags.append(str(whole))
    return "[" + ", ".join(bags) + "]"


def text_of_feature(values: Tensor, weights: Optional[Tensor], offsets: List[int], indent: str) -> str:
    """Return a feature as a text."""
    if weights is None:
        return text_of(values, offsets)
    inner = indent + "    "
    of_values = inner + '"values": ' + text_of(values, offsets)
    of_weights = inner + '"weights": ' + text_of(weights, offsets)
    return "{\n" + of_values + ",\n" + of_weights + "\n" + indent + "}"


def check(
    values: Tensor, weights: Optional[Tensor], lengths: Optional[Tensor], offsets: Optional[Tensor]
) -> None:
    """Raise ValueError for tensors that are not bags of values."""
    if lengths is None and offsets is None:
        raise ValueError("jagged: lengths or offsets have to be given.")
    if weights is not None and weights.shape[0] != values.shape[0]:
        raise ValueError("jagged: there are not as many weights as values.")


def empty_weights(
    is_weighted: bool, dtype: Optional[torch.dtype], device: Optional[torch.device]
) -> Optional[Tensor]:
    """Return no weights, in a tensor if there are to be any."""
    return torch.empty(0, dtype=dtype, device=device) if is_weighted else None


def moved(part: Optional[Tensor], device: torch.device, non_blocking: bool) -> Optional[Tensor]:
    """Return a tensor on `device`, if it is there."""
    return None if part is None else part.to(device, non_blocking=non_blocking)


def pinned(part: Optional[Tensor]) -> Optional[Tensor]:
    """Return a tensor in memory that a GPU reads at full speed, if it is there."""
    return None if part is None else part.pin_memory()


class Bags:
    """What one feature and a batch of them have in common; `register` gives the methods to both."""

    def weights(self) -> Tensor:
        weights = self._weights
        if weights is None:
            raise ValueError("jagged.weights: there are none.")
        return weights

    def weights_or_none(self) -> Optional[Tensor]:
        return self._weights

    def lengths(self) -> Tensor:
        lengths = self._lengths
        if lengths is None:
            offsets = self._offsets
            assert offsets is not None
            lengths = offsets[1:] - offsets[:-1]
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Optional[Tensor]:
        return self._lengths

    def offsets(self) -> Tensor:
        offsets = self._offsets
        if offsets is None:
            offsets = offsets_of(self.lengths())
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Optional[Tensor]:
        return self._offsets

    def device(self) -> torch.device:
        return self._values.device


class JaggedTensor(Bags):
    def __init__(
        self,
        values: Tensor,
        weights: Optional[Tensor] = None,
        lengths: Optional[Tensor] = None,
        offsets: Optional[Tensor] = None,
    ) -> None:
        check(values, weights, lengths, offsets)
        self._values: Tensor = values
        self._weights: Optional[Tensor] = weights
        self._lengths: Optional[Tensor] = lengths
        self._offsets: Optional[Tensor] = offsets

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: Optional[torch.device] = None,
        values_dtype: Optional[torch.dtype] = None,
        weights_dtype: Optional[torch.dtype] = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        return JaggedTensor(
            torch.empty(0, dtype=values_dtype, device=device),
            empty_weights(is_weighted, weights_dtype, device),
            torch.empty(0, dtype=lengths_dtype, device=device),
            torch.zeros(1, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: JaggedTensor) -> JaggedTensor:
        weights = jt.weights_or_none()
        return JaggedTensor(
            torch.empty(0, dtype=jt.values().dtype, device=jt.values().device),
            None if weights is None else torch.empty(0, dtype=weights.dtype, device=weights.device),
            jt.lengths()[:0],
            torch.zeros_like(jt.offsets()[:1]),
        )

    @staticmethod
    def from_dense(values: List[Tensor], weights: Optional[List[Tensor]] = None) -> JaggedTensor:
        sizes: List[int] = []
        for value in values:
            sizes.append(value.shape[0])
        lengths = torch.tensor(sizes, dtype=torch.int32, device=values[0].device)
        together: Optional[Tensor] = None
        if weights is not None:
            together = torch.cat(weights)
        return JaggedTensor(torch.cat(values), together, lengths, offsets_of(lengths))

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Optional[Tensor] = None) -> JaggedTensor:
        is_there = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        chosen: Optional[Tensor] = None
        if weights is not None:
            chosen = weights[is_there]
        return JaggedTensor(values[is_there], chosen, lengths, None)

    def values(self) -> Tensor:
        return self._values

    def to_dense(self) -> List[Tensor]:
        return torch.split(self._values, numbers_of(self.lengths()))

    def to_dense_weights(self) -> Optional[List[Tensor]]:
        weights = self._weights
        if weights is None:
            return None
        return torch.split(weights, numbers_of(self.lengths()))

    def to_padded_dense(self, desired_length: Optional[int] = None, padding_value: float = 0.0) -> Tensor:
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: Optional[int] = None, padding_value: float = 0.0
    ) -> Optional[Tensor]:
        weights = self._weights
        if weights is None:
            return None
        return self._padded(weights, desired_length, padding_value)

    def _padded(self, values: Tensor, desired_length: Optional[int], padding_value: float) -> Tensor:
        lengths = self.lengths()
        size = 0
        if desired_length is not None:
            size = desired_length
        elif lengths.numel() > 0:
            size = int(lengths.max().item())
        return padded(values, lengths, self.offsets(), size, padding_value)

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensor:
        return JaggedTensor(
            self._values.to(device, non_blocking=non_blocking),
            moved(self._weights, device, non_blocking),
            moved(self._lengths, device, non_blocking),
            moved(self._offsets, device, non_blocking),
        )

    def size_in_bytes(self) -> int:
        total = self._values.numel() * self._values.element_size()
        for part in [self._weights, self._lengths, self._offsets]:
            if part is not None:
                total += part.numel() * part.element_size()
        return total

    def __str__(self) -> str:
        offsets = numbers_of(self.offsets())
        weights = self._weights
        if weights is None:
            return "JaggedTensor({\n    " + text_of(self._values, offsets) + "\n})\n"
        return "JaggedTensor(" + text_of_feature(self._values, weights, offsets, "") + ")\n"


class KeyedTensor:
    def __init__(
        self,
        keys: List[str],
        length_per_key: List[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: Optional[List[int]] = None,
        index_per_key: Optional[Dict[str, int]] = None,
    ) -> None:
        if len(keys) != len(length_per_key):
            raise ValueError("jagged: there are not as many lengths as keys.")
        self._keys: List[str] = keys
        self._length_per_key: List[int] = length_per_key
        self._values: Tensor = values
        self._key_dim: int = key_dim

    @staticmethod
    def from_tensor_list(
        keys: List[str], tensors: List[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        sizes: List[int] = []
        for tensor in tensors:
            sizes.append(tensor.shape[key_dim])
        return KeyedTensor(keys, sizes, torch.cat(tensors, cat_dim), key_dim, None, None)

    @staticmethod
    def regroup(keyed_tensors: List[KeyedTensor], groups: List[List[str]]) -> List[Tensor]:
        columns: Dict[str, Tensor] = {}
        for keyed in keyed_tensors:
            for key, part in keyed.to_dict().items():
                columns[key] = part
        first = keyed_tensors[0]
        found: List[Tensor] = []
        for group in groups:
            parts: List[Tensor] = []
            for key in group:
                parts.append(columns[key])
            if len(parts) == 0:
                parts.append(first.values().narrow(first.key_dim(), 0, 0))
            found.append(torch.cat(parts, first.key_dim()))
        return found

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: List[KeyedTensor], groups: List[List[str]], keys: List[str]
    ) -> Dict[str, Tensor]:
        if len(groups) != len(keys):
            raise ValueError("jagged.regroup: there are not as many names as groups.")
        found: Dict[str, Tensor] = {}
        for key, part in zip(keys, KeyedTensor.regroup(keyed_tensors, groups)):
            found[key] = part
        return found

    def keys(self) -> List[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def key_dim(self) -> int:
        return self._key_dim

    def device(self) -> torch.device:
        return self._values.device

    def length_per_key(self) -> List[int]:
        return self._length_per_key

    def offset_per_key(self) -> List[int]:
        return added_up(self._length_per_key)

    def size_in_bytes(self) -> int:
        return self._values.numel() * self._values.element_size()

    def __getitem__(self, key: str) -> Tensor:
        place = self._keys.index(key)
        begin = self.offset_per_key()[place]
        return self._values.narrow(self._key_dim, begin, self._length_per_key[place])

    def to_dict(self) -> Dict[str, Tensor]:
        found: Dict[str, Tensor] = {}
        for key, part in zip(self._keys, torch.split(self._values, self._length_per_key, self._key_dim)):
            found[key] = part
        return found

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedTensor:
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values, self._key_dim, None, None)

    def __str__(self) -> str:
        lines: List[str] = []
        for key, part in self.to_dict().items():
            flat = part.reshape(part.shape[0], -1)
            rows = added_up([flat.shape[1]] * flat.shape[0])
            lines.append('    "' + key + '": ' + text_of(flat.reshape(-1), rows))
        return "KeyedTensor({\n" + ",\n".join(lines) + "\n})\n"


class KeyedJaggedTensor(Bags):
    def __init__(
        self,
        keys: List[str],
        values: Tensor,
        weights: Optional[Tensor] = None,
        lengths: Optional[Tensor] = None,
        offsets: Optional[Tensor] = None,
        stride: Optional[int] = None,
        stride_per_key_per_rank: Optional[Union[Tensor, List[List[int]]]] = None,
        stride_per_key: Optional[List[int]] = None,
        length_per_key: Optional[List[int]] = None,
        lengths_offset_per_key: Optional[List[int]] = None,
        offset_per_key: Optional[List[int]] = None,
        index_per_key: Optional[Dict[str, int]] = None,
        jt_dict: Optional[Dict[str, JaggedTensor]] = None,
        inverse_indices: Optional[Tuple[List[str], Tensor]] = None,
    ) -> None:
        check(values, weights, lengths, offsets)
        strides: Optional[List[List[int]]] = None
        if stride_per_key_per_rank is not None:
            if isinstance(stride_per_key_per_rank, Tensor):
                rows: List[List[int]] = stride_per_key_per_rank.to(torch.int64).tolist()
                strides = rows
            else:
                strides = stride_per_key_per_rank
        self._keys: List[str] = keys
        self._values: Tensor = values
        self._weights: Optional[Tensor] = weights
        self._lengths: Optional[Tensor] = lengths
        self._offsets: Optional[Tensor] = offsets
        self._stride: Optional[int] = stride
        self._strides: Optional[List[List[int]]] = strides
        self._inverse: Optional[Tuple[List[str], Tensor]] = inverse_indices

    @staticmethod
    def from_lengths_sync(
        keys: List[str],
        values: Tensor,
        lengths: Tensor,
        weights: Optional[Tensor] = None,
        stride: Optional[int] = None,
        stride_per_key_per_rank: Optional[Union[Tensor, List[List[int]]]] = None,
        inverse_indices: Optional[Tuple[List[str], Tensor]] = None,
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths=lengths,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        )

    @staticmethod
    def from_offsets_sync(
        keys: List[str],
        values: Tensor,
        offsets: Tensor,
        weights: Optional[Tensor] = None,
        stride: Optional[int] = None,
        stride_per_key_per_rank: Optional[Union[Tensor, List[List[int]]]] = None,
        inverse_indices: Optional[Tuple[List[str], Tensor]] = None,
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        )

    @staticmethod
    def from_jt_dict(jt_dict: Dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        keys: List[str] = []
        values: List[Tensor] = []
        weights: List[Tensor] = []
        lengths: List[Tensor] = []
        strides: List[List[int]] = []
        is_variable = False
        for key, jt in jt_dict.items():
            keys.append(key)
            values.append(jt.values())
            lengths.append(jt.lengths())
            strides.append([jt.lengths().shape[0]])
            is_variable = is_variable or strides[-1][0] != strides[0][0]
            of_feature = jt.weights_or_none()
            if of_feature is not None:
                weights.append(of_feature)
        if len(weights) != 0 and len(weights) != len(keys):
            raise ValueError("jagged.from_jt_dict: some features have weights, and some have none.")
        return KeyedJaggedTensor(
            keys,
            torch.cat(values),
            torch.cat(weights) if len(weights) > 0 else None,
            lengths=torch.cat(lengths),
            stride_per_key_per_rank=strides if is_variable else None,
        )

    @staticmethod
    def concat(kjt_list: List[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        keys: List[str] = []
        values: List[Tensor] = []
        weights: List[Tensor] = []
        lengths: List[Tensor] = []
        strides: List[List[int]] = []
        names: List[str] = []
        rows: List[Tensor] = []
        for kjt in kjt_list:
            keys.extend(kjt.keys())
            values.append(kjt.values())
            lengths.append(kjt.lengths().reshape(-1))
            of_batch = kjt.weights_or_none()
            if of_batch is not None:
                weights.append(of_batch)
            strides.extend(kjt.stride_per_key_per_rank())
            inverse = kjt.inverse_indices_or_none()
            if inverse is not None:
                names.extend(inverse[0])
                rows.append(inverse[1])
        if len(weights) != 0 and len(weights) != len(kjt_list):
            raise ValueError("jagged.concat: some batches have weights, and some have none.")
        if len(strides) != 0 and len(strides) != len(keys):
            raise ValueError("jagged.concat: some batches are variable, and some are not.")
        together: Optional[Tuple[List[str], Tensor]] = None
        if len(rows) > 0:
            together = (names, torch.cat(rows))
        return KeyedJaggedTensor(
            keys,
            torch.cat(values),
            torch.cat(weights) if len(weights) > 0 else None,
            lengths=torch.cat(lengths),
            stride_per_key_per_rank=strides if len(strides) > 0 else None,
            inverse_indices=together,
        )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: Optional[torch.device] = None,
        values_dtype: Optional[torch.dtype] = None,
        weights_dtype: Optional[torch.dtype] = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        keys: List[str] = []
        return KeyedJaggedTensor(
            keys,
            torch.empty(0, dtype=values_dtype, device=device),
            empty_weights(is_weighted, weights_dtype, device),
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return kjt._some([])

    def _new(
        self,
        keys: List[str],
        values: Tensor,
        weights: Optional[Tensor],
        lengths: Optional[Tensor],
        offsets: Optional[Tensor],
        stride: Optional[int],
        strides: Optional[Union[Tensor, List[List[int]]]],
        inverse: Optional[Tuple[List[str], Tensor]],
    ) -> KeyedJaggedTensor:
        # A class has no defaults while it is compiled.
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths,
            offsets,
            stride,
            strides,
            None,
            None,
            None,
            None,
            None,
            None,
            inverse,
        )

    def keys(self) -> List[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def stride(self) -> int:
        inverse = self._inverse
        if inverse is not None:
            return inverse[1].shape[1]
        strides = self._strides
        if strides is not None:
            largest = 0
            for size in sums_of(strides):
                largest = max(largest, size)
            return largest
        stride = self._stride
        if len(self._keys) == 0:
            return 0 if stride is None else stride
        return self.lengths().numel() // len(self._keys)

    def stride_per_key(self) -> List[int]:
        strides = self._strides
        if strides is None:
            return [self.stride()] * len(self._keys)
        return sums_of(strides)

    def stride_per_key_per_rank(self) -> List[List[int]]:
        strides = self._strides
        nothing: List[List[int]] = []
        return nothing if strides is None else strides

    def variable_stride_per_key(self) -> bool:
        return self._strides is not None

    def inverse_indices(self) -> Tuple[List[str], Tensor]:
        inverse = self._inverse
        if inverse is None:
            raise ValueError("jagged.inverse_indices: there are none.")
        return inverse

    def inverse_indices_or_none(self) -> Optional[Tuple[List[str], Tensor]]:
        return self._inverse

    def length_per_key(self) -> List[int]:
        if len(self._keys) == 0:
            nothing: List[int] = []
            return nothing
        lengths = self.lengths().reshape(-1)
        if self._strides is None:
            return numbers_of(lengths.reshape(len(self._keys), self.stride()).sum(1))
        sums: List[Tensor] = []
        for part in torch.split(lengths, self.stride_per_key()):
            sums.append(part.sum())
        return numbers_of(torch.stack(sums))

    def length_per_key_or_none(self) -> Optional[List[int]]:
        return self.length_per_key()

    def offset_per_key(self) -> List[int]:
        return added_up(self.length_per_key())

    def offset_per_key_or_none(self) -> Optional[List[int]]:
        return self.offset_per_key()

    def lengths_offset_per_key(self) -> List[int]:
        return added_up(self.stride_per_key())

    def index_per_key(self) -> Dict[str, int]:
        places: Dict[str, int] = {}
        for place, key in enumerate(self._keys):
            places[key] = place
        return places

    def sync(self) -> KeyedJaggedTensor:
        return self

    def unsync(self) -> KeyedJaggedTensor:
        return self

    def _features(self) -> List[JaggedTensor]:
        found: List[JaggedTensor] = []
        if len(self._keys) == 0:
            return found
        ends = self.offset_per_key()
        bags = self.lengths_offset_per_key()
        lengths = self.lengths().reshape(-1)
        weights = self._weights
        for place in range(len(self._keys)):
            begin, end = ends[place], ends[place + 1]
            found.append(
                JaggedTensor(
                    self._values[begin:end],
                    None if weights is None else weights[begin:end],
                    lengths[bags[place] : bags[place + 1]],
                )
            )
        return found

    def __getitem__(self, key: str) -> JaggedTensor:
        return self._features()[self._keys.index(key)]

    def to_dict(self, compute_offsets: bool = True) -> Dict[str, JaggedTensor]:
        found: Dict[str, JaggedTensor] = {}
        for key, feature in zip(self._keys, self._features()):
            found[key] = feature
        return found

    def _some(self, places: List[int]) -> KeyedJaggedTensor:
        features = self._features()
        strides = self.stride_per_key_per_rank()
        keys: List[str] = []
        values: List[Tensor] = [self._values[:0]]
        weights: List[Tensor] = []
        lengths: List[Tensor] = [self.lengths().reshape(-1)[:0]]
        chosen: List[List[int]] = []
        if self._weights is not None:
            weights.append(self.weights()[:0])
        for place in places:
            keys.append(self._keys[place])
            values.append(features[place].values())
            lengths.append(features[place].lengths())
            if self._weights is not None:
                weights.append(features[place].weights())
            if self._strides is not None:
                chosen.append(strides[place])
        return self._new(
            keys,
            torch.cat(values),
            torch.cat(weights) if self._weights is not None else None,
            torch.cat(lengths),
            None,
            self.stride() if len(places) == 0 else None,
            chosen if self._strides is not None else None,
            None,
        )

    def split(self, segments: List[int]) -> List[KeyedJaggedTensor]:
        found: List[KeyedJaggedTensor] = []
        begin = 0
        for segment in segments:
            if segment == len(self._keys):
                found.append(self)
            else:
                found.append(self._some(list(range(begin, begin + segment))))
            begin += segment
        return found

    def permute(self, indices: List[int], indices_tensor: Optional[Tensor] = None) -> KeyedJaggedTensor:
        return self._some(indices)

    def flatten_lengths(self) -> KeyedJaggedTensor:
        return self._with(self._weights, self.lengths().reshape(-1))

    def with_weights(self, weights: Optional[Tensor]) -> KeyedJaggedTensor:
        return self._with(weights, self._lengths)

    def _with(self, weights: Optional[Tensor], lengths: Optional[Tensor]) -> KeyedJaggedTensor:
        return self._new(
            self._keys,
            self._values,
            weights,
            lengths,
            self._offsets,
            self._stride,
            self._strides,
            self._inverse,
        )

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: Optional[torch.dtype] = None
    ) -> KeyedJaggedTensor:
        weights = moved(self._weights, device, non_blocking)
        if weights is not None and dtype is not None:
            weights = weights.to(dtype)
        inverse = self._inverse
        if inverse is not None:
            inverse = (inverse[0], inverse[1].to(device, non_blocking=non_blocking))
        return self._new(
            self._keys,
            self._values.to(device, non_blocking=non_blocking),
            weights,
            moved(self._lengths, device, non_blocking),
            moved(self._offsets, device, non_blocking),
            self._stride,
            self._strides,
            inverse,
        )

    def pin_memory(self) -> KeyedJaggedTensor:
        return self._new(
            self._keys,
            self._values.pin_memory(),
            pinned(self._weights),
            pinned(self._lengths),
            pinned(self._offsets),
            self._stride,
            self._strides,
            self._inverse,
        )

    def dist_labels(self) -> List[str]:
        labels = ["lengths", "values"]
        if self._strides is not None:
            labels.append("strides")
        if self._weights is not None:
            labels.append("weights")
        return labels

    def dist_splits(self, key_splits: List[int]) -> List[List[int]]:
        bags = added_up(self.stride_per_key())
        values = self.offset_per_key()
        of_bags: List[int] = []
        of_values: List[int] = []
        begin = 0
        for split in key_splits:
            of_bags.append(bags[begin + split] - bags[begin])
            of_values.append(values[begin + split] - values[begin])
            begin += split
        splits = [of_bags, of_values]
        if self._strides is not None:
            splits.append(key_splits)
        if self._weights is not None:
            splits.append(of_values)
        return splits

    def dist_tensors(self) -> List[Tensor]:
        tensors = [self.lengths(), self._values]
        strides = self._strides
        if strides is not None:
            tensors.append(torch.tensor(sums_of(strides), device=self._values.device))
        weights = self._weights
        if weights is not None:
            tensors.append(weights)
        return tensors

    def size_in_bytes(self) -> int:
        total = self._values.numel() * self._values.element_size()
        for part in [self._weights, self._lengths, self._offsets]:
            if part is not None:
                total += part.numel() * part.element_size()
        inverse = self._inverse
        if inverse is not None:
            total += inverse[1].numel() * inverse[1].element_size()
        return total

    def __str__(self) -> str:
        lines: List[str] = []
        for key, feature in zip(self._keys, self._features()):
            text = text_of_feature(
                feature.values(), feature.weights_or_none(), numbers_of(feature.offsets()), "    "
            )
            lines.append('    "' + key + '": ' + text)
        return "KeyedJaggedTensor({\n" + ",\n".join(lines) + "\n})\n"


def register() -> None:
    """Compile the classes, in the order in which they use each other, in the place of the public ones."""
    from torch._jit_internal import _qualified_name
    from torch.jit import _state, frontend

    public = sys.modules["tessera.sparse.jagged_tensor"]
    # What methods speak of: builtins, this module, the public classes, and types with a dot in their names.
    known = {**vars(builtins), **globals(), "torch.device": torch.device, "torch.dtype": torch.dtype}
    twins = (JaggedTensor, KeyedTensor, KeyedJaggedTensor)
    # torch.jit takes the methods of a class itself, and none that it has from others.
    for twin in (JaggedTensor, KeyedJaggedTensor):
        for name, method in vars(Bags).items():
            if callable(method):
                setattr(twin, name, method)
    known |= {twin.__name__: getattr(public, twin.__name__) for twin in twins}
    for twin in twins:
        cls = known[twin.__name__]
        if _state._get_script_class(cls) is not None:
            continue
        definition = frontend.get_jit_class_def(twin, twin.__name__)
        defaults = frontend.get_default_args_for_class(twin)
        compiled = torch._C._jit_script_class_compile(_qualified_name(cls), definition, defaults, known.get)
        _state._add_script_class(cls, compiled)
        for name, static in vars(twin).items():
            if isinstance(static, staticmethod):
                function, own = static.__func__, getattr(cls, name)
                definition = frontend.get_jit_def(function, name)
                defaults = frontend.get_default_args(function)
                scripted = torch._C._jit_script_compile(_qualified_name(own), definition, known.get, defaults)
                _state._set_jit_function_cache(own, scripted)
