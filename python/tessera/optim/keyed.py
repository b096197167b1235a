"""Optimizers whose state goes by the names of parameters.

>>> import torch
>>> weight = torch.nn.Parameter(torch.ones(1))
>>> combined = CombinedOptimizer([("dense", torch.optim.SGD([weight], lr=0.5))])
>>> weight.grad = torch.ones(1)
>>> combined.step()
>>> weight.tolist()
[0.5]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CombinedOptimizer"]


class CombinedOptimizer:
    """Step several optimizers as one. Each has a name, which begins the names of its state."""

    def __init__(self, optims: Sequence[Any | tuple[str, Any]]) -> None:
        self._optims = [item if isinstance(item, tuple) else ("", item) for item in optims]

    @property
    def optimizers(self) -> list[tuple[str, Any]]:
        """Return the optimizers and their names."""
        return self._optims

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all optimizers; their learning rates may be changed."""
        return [group for _, optimizer in self._optims for group in optimizer.param_groups]

    @property
    def params(self) -> dict[str, Any]:
        """Return the parameters by name, of the optimizers that know names."""
        return {
            f"{name}.{key}" if name else key: value
            for name, optimizer in self._optims
            for key, value in getattr(optimizer, "params", {}).items()
        }

    def step(self, closure: Any = None) -> None:
        """Step all."""
        for _, optimizer in self._optims:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for _, optimizer in self._optims:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers, by their names."""
        return {name: optimizer.state_dict() for name, optimizer in self._optims}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy. Raise ValueError naming an optimizer that is missing or unknown."""
        own, given = [name for name, _ in self._optims], list(state_dict)
        if sorted(own) != sorted(given):
            raise ValueError(f"optim.combined: the state is of optimizers {given}; there are {own}.")
        for name, optimizer in self._optims:
            optimizer.load_state_dict(state_dict[name])
