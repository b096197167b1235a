"""The optimizer that steps the rows of sharded tables, as torch's loops see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessera import _C
from tessera.optim.fused import FusedOptimizer

# What each rule keeps of a table: a number per element, or one per row.
_ELEMENT, _ROW = "element", "row"
_KEPT = {
    "SGD": {},
    "ADAGRAD": {"momentum1": _ELEMENT},
    "ROWWISE_ADAGRAD": {"momentum1": _ROW},
    "ADAM": {"momentum1": _ELEMENT, "momentum2": _ELEMENT},
    "ADAMW": {"momentum1": _ELEMENT, "momentum2": _ELEMENT},
    "PARTIAL_ROWWISE_ADAM": {"momentum1": _ELEMENT, "momentum2": _ROW},
    "LAMB": {"momentum1": _ELEMENT, "momentum2": _ELEMENT},
    "PARTIAL_ROWWISE_LAMB": {"momentum1": _ELEMENT, "momentum2": _ROW},
    "LARS_SGD": {"momentum1": _ELEMENT},
}
# Those that correct their averages by the number of the step.
_COUNTS = frozenset(("ADAM", "ADAMW", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB"))


def kept_state(kind: _C.embedding.OptimizerKind) -> dict[str, bool]:
    """Return the names of what a rule keeps of a table, and whether it is one number per row."""
    return {name: form == _ROW for name, form in _KEPT[kind.name].items()}


class FusedTableOptimizer(FusedOptimizer):
    """Stand for the steps that backward takes.

    `step` steps nothing if backward did; it tells the tables the learning rate of `param_groups`, and so
    does `zero_grad`, so that a schedule works as with any optimizer. Tables that accumulate sparse
    gradients step in `step`. State has sharded tensors under the names of parameters:
    `<table>.momentum1` and so on, the engine's own memory; and `<table>.step` for rules that count.
    """

    def __init__(
        self,
        engine: _C.sharding.ShardedEmbeddingBagCollection,
        params: Mapping[str, Any],
        state: Mapping[Any, dict[str, Any]],
        options: _C.embedding.OptimizerOptions,
        accumulates: bool,
    ) -> None:
        self._engine = engine
        self._accumulates = accumulates
        self._rate = options.learning_rate
        self._counters: list[torch.Tensor] = []
        if options.kind.name in _COUNTS:
            for name, param in params.items():
                counter = torch.zeros((), dtype=torch.int64)
                state[param][f"{name.split('.')[-2]}.step"] = counter
                self._counters.append(counter)
        super().__init__(params, state, [{"params": list(params.values()), "lr": self._rate}])

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

    def _num_steps(self) -> int:
        return max((optimizer.num_steps for optimizer in self._engine.optimizers()), default=0)

    def state_dict(self) -> dict[str, Any]:
        """Return `state` by the names of parameters; it loads into the same sharding."""
        self._engine.write_back()
        for counter in self._counters:
            counter.fill_(self._num_steps())
        return super().state_dict()

    def post_load_state_dict(self) -> None:
        """Tell the tables the rate and the number of the step."""
        self._tell_rate()
        if not self._counters:
            return
        for optimizer in self._engine.optimizers():
            optimizer.load_state_dict({**optimizer.state_dict(), "step": self._counters[0].clone()})

    def copy_to(self, other: FusedTableOptimizer) -> None:
        """Give everything to the optimizer of a copy of the tables."""
        self._engine.write_back()
        for mine, theirs in zip(self._engine.optimizers(), other._engine.optimizers(), strict=True):
            theirs.load_state_dict(mine.state_dict())
        other.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        other._tell_rate()
