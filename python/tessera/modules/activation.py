"""Activations beyond torch's.

>>> import torch
>>> SwishLayerNorm(3)(torch.zeros(1, 3)).tolist()
[[0.0, 0.0, 0.0]]
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["SwishLayerNorm"]


class SwishLayerNorm(nn.Module):
    """Return x * sigmoid(layer_norm(x)); `input_dims` are the dimensions that are normalised together."""

    def __init__(self, input_dims: int | list[int] | torch.Size, device: torch.device | None = None) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        return input * self.norm(input)
