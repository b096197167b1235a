"""Cross networks: polynomials of the input, one degree a layer.

All take (..., n) and return the same shape. Layer l makes x_{l+1} = x_0 * cross_l(x_l) + x_l.

>>> import torch
>>> net = CrossNet(3, 1)
>>> _ = torch.nn.init.eye_(net.kernels[0])
>>> net(torch.tensor([[1.0, 2.0, 3.0]])).tolist()
[[2.0, 6.0, 12.0]]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["CrossNet", "LowRankCrossNet", "LowRankMixtureCrossNet", "VectorCrossNet"]


def _kernels(count: int, *shape: int) -> nn.ParameterList:
    """Return parameters filled from Xavier's normal distribution."""
    return nn.ParameterList(nn.Parameter(nn.init.xavier_normal_(torch.empty(*shape))) for _ in range(count))


def _zeros(count: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.zeros(*shape)) for _ in range(count))


def _check_rank(low_rank: int) -> None:
    if low_rank < 1:
        raise AssertionError(f"crossnet: low_rank is {low_rank}; it has to be 1 or more.")


class CrossNet(nn.Module):
    """Cross with a full matrix: W x_l + b."""

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self._num_layers = num_layers
        self.kernels = _kernels(num_layers, in_features, in_features)
        self.bias = _zeros(num_layers, in_features, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        rows = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            rows = input * nn.functional.linear(rows, kernel, bias.squeeze(1)) + rows
        return rows


class LowRankCrossNet(nn.Module):
    """Cross with the product of two matrices of rank `low_rank`: W (V x_l) + b."""

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        _check_rank(low_rank)
        self._num_layers = num_layers
        self._low_rank = low_rank
        self.W_kernels = _kernels(num_layers, in_features, low_rank)
        self.V_kernels = _kernels(num_layers, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        linear = nn.functional.linear
        rows = input
        for up, down, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            rows = input * linear(linear(rows, down), up, bias) + rows
        return rows


class VectorCrossNet(nn.Module):
    """Cross with one number per row: x_{l+1} = x_0 (w . x_l) + b + x_l."""

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self._num_layers = num_layers
        self.kernels = _kernels(num_layers, in_features, 1)
        self.bias = _zeros(num_layers, in_features, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        rows = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            rows = input * (rows @ kernel) + bias.squeeze(1) + rows
        return rows


class LowRankMixtureCrossNet(nn.Module):
    """Cross with a mixture of experts of low rank, each U g(C g(V x_l)) + b; g is `activation`.

    The softmax of one gate per expert, shared by all layers, weighs them; a single expert has no gate.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: nn.Module | Callable[[torch.Tensor], torch.Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        if num_experts < 1:
            raise AssertionError(f"crossnet: num_experts is {num_experts}; it has to be 1 or more.")
        _check_rank(low_rank)
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._low_rank = low_rank
        self._in_features = in_features
        self.U_kernels = _kernels(num_layers, num_experts, in_features, low_rank)
        self.V_kernels = _kernels(num_layers, num_experts, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features, 1)
        self.gates = (
            nn.ModuleList(nn.Linear(in_features, 1, bias=False) for _ in range(num_experts))
            if num_experts > 1
            else None
        )
        self._activation = activation
        self.C_kernels = _kernels(num_layers, num_experts, low_rank, low_rank)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        rows = input
        layers = zip(self.U_kernels, self.C_kernels, self.V_kernels, self.bias, strict=True)
        for up, inner, down, bias in layers:
            inside = self._activation(torch.einsum("...n,ern->...er", rows, down))
            inside = self._activation(torch.einsum("...er,esr->...es", inside, inner))
            experts = torch.einsum("...er,enr->...en", inside, up) + bias.squeeze(1)
            experts = input.unsqueeze(-2) * experts
            if self.gates is None:
                rows = experts.squeeze(-2) + rows
            else:
                gates = torch.cat([gate(rows) for gate in self.gates], dim=-1).softmax(-1)
                rows = torch.einsum("...e,...en->...n", gates, experts) + rows
        return rows
