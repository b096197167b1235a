"""Columns of several KeyedTensors, put together by group.

>>> import torch
>>> from tessera.sparse.jagged_tensor import KeyedTensor
>>> pooled = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
>>> KTRegroupAsDict([["b"], ["b", "a"]], ["x", "y"])([pooled])["y"].tolist()
[[2.0, 3.0, 1.0]]
"""

from __future__ import annotations

import torch
from torch import nn

from tessera.modules.embedding_configs import DataType, data_type_to_dtype
from tessera.sparse.jagged_tensor import KeyedTensor
from tessera.types import CacheMixin

__all__ = ["KTRegroupAsDict"]


class KTRegroupAsDict(nn.Module, CacheMixin):
    """Return a tensor for each group, by name; `emb_dtype` is the type of the results, if it is another."""

    def __init__(
        self,
        groups: list[list[str]],
        keys: list[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise AssertionError(f"KTRegroupAsDict: there are {len(groups)} groups and {len(keys)} names.")
        self._groups = groups
        self._keys = keys
        self._dtype = None if emb_dtype is None else data_type_to_dtype(emb_dtype)

    def clear_cache(self) -> None:
        """Do nothing: the columns are found in every call."""

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, torch.Tensor]:
        """Return the columns of each group's keys, in the order listed."""
        found = KeyedTensor.regroup_as_dict(keyed_tensors, self._groups, self._keys)
        dtype = self._dtype
        if dtype is None:
            return found
        return {key: found[key].to(dtype) for key in self._keys}
