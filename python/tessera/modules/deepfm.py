"""The two halves of DeepFM (Guo et al., 2017), over embeddings.

>>> import torch
>>> FactorizationMachine()([torch.ones(1, 2), torch.ones(1, 3)]).tolist()
[[10.0]]
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["DeepFM", "FactorizationMachine"]


def _flat(embeddings: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten(1) for part in embeddings], dim=1)


class DeepFM(nn.Module):
    """Give all embeddings of a sample, side by side, to `dense_module`."""

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return what the module makes of them; each is (batch, ...)."""
        return self.dense_module(_flat(embeddings))


class FactorizationMachine(nn.Module):
    """Sum the products of all pairs of values of a sample."""

    def forward(self, embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return (batch, 1): half of the square of the sum less the sum of the squares."""
        values = _flat(embeddings)
        sums = values.sum(dim=1, keepdim=True)
        return (sums * sums - (values * values).sum(dim=1, keepdim=True)) * 0.5
