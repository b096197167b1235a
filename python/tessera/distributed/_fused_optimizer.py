"""The optimizer that steps the rows of sharded tables, as torch's loops see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessera import _C


class FusedTableOptimizer:
    """Stand for the steps that backward takes.

    `step` steps nothing if backward did; it tells the tables the learning rate of `param_groups`, and so
    does `zero_grad`, so that a schedule works as with any optimizer. Tables that accumulate sparse
    gradients step in `step`.
    """

    def __init__(
        self,
        engine: _C.sharding.ShardedEmbeddingBagCollection,
        params: dict[str, torch.Tensor],
        learning_rate: float,
        accumulates: bool,
    ) -> None:
        self._engine = engine
        self._accumulates = accumulates
        self._rate = learning_rate
        self.params = params
        self.param_groups: list[dict[str, Any]] = [{"params": list(params.values()), "lr": learning_rate}]

    def _tell_rate(self) -> None:
        rate = self.param_groups[0]["lr"]
        if rate != self._rate:
            self._engine.set_learning_rate(rate)
            self._rate = rate

    def step(self, closure: Any = None) -> None:
        """Step the tables that accumulate gradients."""
        self._tell_rate()
        if self._accumulates:
            self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of tables that accumulate them."""
        self._tell_rate()
        if self._accumulates:
            self._engine.zero_grad_rows()

    def _states(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for optimizer in self._engine.optimizers()
            for name, tensor in optimizer.state_dict().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return `state`, the tensors of this rank's parts ("<table>.momentum1"), and the rate."""
        return {"state": self._states(), "lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy. Raise ValueError naming what is missing, unexpected or of another shape."""
        given = dict(state_dict["state"])
        unknown = sorted(given.keys() - self._states().keys())
        if unknown:
            raise ValueError(f"sharding.fused_optimizer: the state has {unknown[0]!r}, which is not here.")
        for optimizer in self._engine.optimizers():
            own = optimizer.state_dict()
            optimizer.load_state_dict({name: given[name] for name in own if name in given})
        self.param_groups[0]["lr"] = state_dict["lr"]
        self._tell_rate()
