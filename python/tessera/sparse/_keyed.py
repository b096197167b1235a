"""Dense columns by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera import _C
from tessera.sparse._traced import BatchMeta, as_node, is_traced, proxy_in
from tessera.streamable import Pipelineable

_Engine = _C.jagged.KeyedTensor


class KeyedTensor(Pipelineable, metaclass=BatchMeta):
    """Hold dense columns side by side and find them by name.

    >>> import torch
    >>> kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
    >>> kt["b"].tolist()
    [[2.0, 3.0]]
    """

    _held: Any = None  # what the engine has made of it; scripts return batches without

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        if is_traced(values):
            self._take(list(keys), list(length_per_key), values, key_dim)
        else:
            self._hold(_Engine(keys, length_per_key, values, key_dim))

    def _take(self, keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int) -> None:
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = key_dim
        self._held: Any = None

    def _hold(self, engine: Any) -> None:
        self._take(engine.keys(), engine.length_per_key(), engine.values(), engine.key_dim())
        self._held = engine

    def _engine(self) -> Any:
        """Return what the engine takes."""
        if self._held is None:
            self._held = _Engine(self._keys, self._length_per_key, self._values, self._key_dim)
        return self._held

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """Put columns side by side."""
        if proxy_in(tensors) is not None:
            return as_node(KeyedTensor.from_tensor_list, keys, tensors, key_dim, cat_dim)
        if not is_traced(tensors[0] if len(tensors) else None):
            return kt_of(_Engine.from_tensor_list(keys, tensors, key_dim, cat_dim))
        sizes = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, sizes, torch.cat(list(tensors), cat_dim), key_dim)

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Return one tensor per group: the columns of its keys, in the order listed."""
        if proxy_in(keyed_tensors) is not None:
            return as_node(KeyedTensor.regroup, keyed_tensors, groups)
        if not len(keyed_tensors) or not is_traced(keyed_tensors[0]._values):
            return _Engine.regroup([keyed._engine() for keyed in keyed_tensors], groups)
        columns = {}
        for keyed in keyed_tensors:
            columns.update(keyed.to_dict())
        first = keyed_tensors[0]
        found = []
        for group in groups:
            for key in group:
                if key not in columns:
                    raise IndexError(f"jagged.regroup: no keyed tensor has a key '{key}'.")
            parts = [columns[key] for key in group]
            dim = first._key_dim
            found.append(torch.cat(parts, dim) if parts else first._values.narrow(dim, 0, 0))
        return found

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return `KeyedTensor.regroup` with a name for each group."""
        if len(groups) != len(keys):
            raise ValueError(f"jagged.regroup: there are {len(groups)} groups and {len(keys)} names.")
        if proxy_in(keyed_tensors) is not None:
            return as_node(KeyedTensor.regroup_as_dict, keyed_tensors, groups, keys)
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def keys(self) -> list[str]:
        """Return the names."""
        return self._keys

    def values(self) -> Tensor:
        """Return all columns."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension along which the columns lie."""
        return self._key_dim

    def device(self) -> torch.device:
        """Return where the values are."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Return the number of columns of each name."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return where the columns of each name begin, and where the last ones end."""
        offsets = [0]
        for length in self._length_per_key:
            offsets.append(offsets[-1] + length)
        return offsets

    def size_in_bytes(self) -> int:
        """Return the bytes of the values."""
        return self._values.numel() * self._values.element_size()

    def __getitem__(self, key: str) -> Tensor:
        if not is_traced(self._values):
            return self._engine()[key]
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, Tensor]:
        """Return the columns by name."""
        if not is_traced(self._values):
            return self._engine().to_dict()
        parts = torch.split(self._values, self._length_per_key, self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """Return the columns on `device`."""
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the values until `stream` has used them."""
        self._engine().record_stream(stream)

    def __str__(self) -> str:
        return str(self._engine())

    __repr__ = __str__


KeyedTensor.__module__ = "tessera.sparse.jagged_tensor"


def kt_of(engine: Any) -> KeyedTensor:
    """Return what the engine gave as the class that users know."""
    kt = KeyedTensor.__new__(KeyedTensor)
    kt._hold(engine)
    return kt
