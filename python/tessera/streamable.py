"""Things that a batch is made of, and what streams must know of them."""

from __future__ import annotations

import abc

import torch

__all__ = ["Multistreamable", "Pipelineable"]


class Multistreamable(abc.ABC):
    """Hold tensors that may be used on several streams."""

    @abc.abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until `stream` has used them."""


class Pipelineable(Multistreamable):
    """Hold a batch that can be brought to a device."""

    @abc.abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Pipelineable:
        """Return the batch on `device`."""
