"""Batches of clicks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.streamable import Pipelineable

__all__ = ["Batch"]


@dataclass
class Batch(Pipelineable):
    """Hold dense features [B, n], sparse features and labels [B].

    >>> ids = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1]), torch.tensor([1]))
    >>> batch = Batch(torch.zeros(1, 2), ids, torch.ones(1))
    >>> batch.to(torch.device("meta")).labels.device
    device(type='meta')
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`."""
        return Batch(
            self.dense_features.to(device=device, non_blocking=non_blocking),
            self.sparse_features.to(device=device, non_blocking=non_blocking),
            self.labels.to(device=device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until `stream` has used them."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory."""
        return Batch(
            self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory()
        )
