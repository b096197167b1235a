"""One feature of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera import _C
from tessera.sparse._bags import Bags
from tessera.sparse._traced import cut, is_traced, offsets_of, padded, sizes_of

_Engine = _C.jagged.JaggedTensor


class JaggedTensor(Bags):
    """Hold one feature of a batch: values, bag after bag, and the length of each bag.

    Lengths, offsets or both are given (int32 or int64); `weights`, if any, has one entry per value.

    >>> import torch
    >>> jt = JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1]))
    >>> jt.offsets().tolist()
    [0, 2, 2, 3]
    >>> jt.to_padded_dense(desired_length=2).tolist()
    [[1, 2], [0, 0], [3, 0]]
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if is_traced(values):
            self._take(values, weights, lengths, offsets)
        else:
            self._hold(_Engine(values, weights, lengths, offsets))

    def _take(
        self, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
    ) -> None:
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._held: Any = None

    def _hold(self, engine: Any) -> None:
        self._take(
            engine.values(), engine.weights_or_none(), engine.lengths_or_none(), engine.offsets_or_none()
        )
        self._held = engine

    def _engine(self) -> Any:
        """Return what the engine takes."""
        if self._held is None:
            self._held = _Engine(self._values, self._weights, self._lengths, self._offsets)
        return self._held

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """Return a feature without bags."""
        return jt_of(_Engine.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype))

    @staticmethod
    def empty_like(jt: JaggedTensor) -> JaggedTensor:
        """Return a feature without bags, of the same types."""
        return jt_of(_Engine.empty_like(jt._engine()))

    @staticmethod
    def from_dense(values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> JaggedTensor:
        """Return one bag for each tensor."""
        if not is_traced(values[0] if len(values) else None):
            return jt_of(_Engine.from_dense(values, weights))
        lengths = torch.tensor([value.shape[0] for value in values], device=values[0].device)
        together = None if weights is None else torch.cat(list(weights))
        return JaggedTensor(torch.cat(list(values)), together, lengths, offsets_of(lengths))

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """Return the first `lengths[i]` columns of each row."""
        if not is_traced(values):
            return jt_of(_Engine.from_dense_lengths(values, lengths, weights))
        is_there = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
        return JaggedTensor(values[is_there], None if weights is None else weights[is_there], lengths)

    def values(self) -> Tensor:
        """Return the values, bag after bag."""
        return self._values

    def to_dense(self) -> list[Tensor]:
        """Return the values of each bag."""
        if is_traced(self._values):
            return list(cut(self._values, sizes_of(self.lengths())))
        return self._engine().to_dense()

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return the weights of each bag."""
        if is_traced(self._values):
            return None if self._weights is None else list(cut(self._weights, sizes_of(self.lengths())))
        return self._engine().to_dense_weights()

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return one row for each bag, cut or filled up; as long as the longest bag if nothing is said."""
        if is_traced(self._values):
            return self._padded(self._values, desired_length, padding_value)
        return self._engine().to_padded_dense(desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Return the same of the weights."""
        if not is_traced(self._values):
            return self._engine().to_padded_dense_weights(desired_length, padding_value)
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, values: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        lengths = self.lengths()
        size = sizes_of(lengths.max()[None])[0] if desired_length is None else desired_length
        return padded(values, lengths, self.offsets(), size, padding_value)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """Return the feature on `device`."""
        if not is_traced(self._values):
            return jt_of(self._engine().to(device, non_blocking))
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return JaggedTensor(*(part if part is None else part.to(device, non_blocking) for part in parts))


JaggedTensor.__module__ = "tessera.sparse.jagged_tensor"


def jt_of(engine: Any) -> JaggedTensor:
    """Return what the engine gave as the class that users know."""
    return JaggedTensor._of(engine)


def jts_of(named: dict[str, Any]) -> dict[str, JaggedTensor]:
    """Return features of the engine by name."""
    return {name: jt_of(engine) for name, engine in named.items()}
