"""Stacks of linear layers.

>>> import torch
>>> MLP(10, [8, 3])(torch.zeros(2, 10)).shape
torch.Size([2, 3])
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tessera.modules.activation import SwishLayerNorm
from tessera.modules.utils import extract_module_or_tensor_callable

__all__ = ["MLP", "Perceptron"]

Activation = nn.Module | Callable[[torch.Tensor], torch.Tensor]


class Perceptron(nn.Module):
    """Apply one linear layer and an activation."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._in_size = in_size
        self._out_size = out_size
        self._linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return (..., out_size) of (..., in_size)."""
        return self._activation_fn(self._linear(input))


class MLP(nn.Module):
    """Apply perceptrons one after the other, the last without an activation unless `activation_on_last`.

    `activation` is ``"relu"``, ``"sigmoid"``, ``"swish_layernorm"``, a function of a tensor, a module that
    all layers share, or what makes a module for each layer.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: list[int],
        bias: bool = True,
        activation: str | Callable[[], nn.Module] | Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        layers = []
        for place, (size_in, size_out) in enumerate(zip([in_size, *layer_sizes], layer_sizes, strict=False)):
            is_plain = place == len(layer_sizes) - 1 and not activation_on_last
            chosen = nn.Identity() if is_plain else _activation(activation, size_out, device)
            layers.append(Perceptron(size_in, size_out, bias, chosen, device, dtype))
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return (..., layer_sizes[-1]) of (..., in_size)."""
        return self._mlp(input)


def _activation(wish, size: int, device: torch.device | None) -> Activation:
    named = {
        "relu": lambda: torch.relu,
        "sigmoid": lambda: torch.sigmoid,
        "swish_layernorm": lambda: SwishLayerNorm(size, device=device),
    }
    if isinstance(wish, str):
        if wish not in named:
            raise ValueError(f"MLP: the activation {wish!r} is not one of {', '.join(named)}.")
        return named[wish]()
    return extract_module_or_tensor_callable(wish)
