"""What one feature of a batch and all of them have in common: bags of values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tessera.sparse._traced import BatchMeta, is_traced, lengths_of, offsets_of
from tessera.streamable import Pipelineable

if TYPE_CHECKING:
    from typing import Self


class Bags(Pipelineable, metaclass=BatchMeta):
    """Hold values, bag after bag, with their lengths, offsets or both."""

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None
    _held: Any = None  # what the engine has made of it; scripts return batches without

    def _engine(self) -> Any:
        """Return what the engine takes."""
        raise NotImplementedError

    def _hold(self, engine: Any) -> None:
        """Be what the engine gave."""
        raise NotImplementedError

    @classmethod
    def _of(cls, engine: Any) -> Self:
        bags = cls.__new__(cls)
        bags._hold(engine)
        return bags

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def weights(self) -> Tensor:
        """Return the weights; ValueError if there are none."""
        if self._weights is None:
            return self._engine().weights()
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weights, if there are any."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the length of each bag."""
        if self._lengths is None:
            if is_traced(self._values):
                return lengths_of(self._offsets)
            self._lengths = self._engine().lengths()
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths, if they are there."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return where each bag begins, and where the last one ends."""
        if self._offsets is None:
            if is_traced(self._values):
                return offsets_of(self._lengths)
            self._offsets = self._engine().offsets()
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets, if they are there."""
        return self._offsets

    def device(self) -> torch.device:
        """Return where the values are."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return self._engine().size_in_bytes()

    def pin_memory(self) -> Self:
        """Return the same in memory that a GPU reads at full speed."""
        return self._of(self._engine().pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until `stream` has used them."""
        self._engine().record_stream(stream)

    def __str__(self) -> str:
        return str(self._engine())

    __repr__ = __str__
