"""Optimizers whose steps backward takes."""

from __future__ import annotations

import abc
from typing import Any

from tessera.optim.keyed import KeyedOptimizer

__all__ = ["EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule"]


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """Stand for the steps that backward takes."""

    @abc.abstractmethod
    def step(self, closure: Any = None) -> Any:
        """Do what backward did not do."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that backward left."""


class EmptyFusedOptimizer(FusedOptimizer):
    """Have no parameters.

    >>> EmptyFusedOptimizer().state_dict()
    {'state': {}}
    """

    def __init__(self) -> None:
        super().__init__({}, {}, [])

    def step(self, closure: Any = None) -> None:
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""


class FusedOptimizerModule(abc.ABC):
    """Have an optimizer that backward steps."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """Return the optimizer."""
