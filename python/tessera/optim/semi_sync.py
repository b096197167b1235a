"""Local steps by one optimizer, and every so often a global step by another.

The global optimizer (such as DiLoCo) is a KeyedOptimizer around one that has `global_step(local_steps,
closure)`, which brings the ranks' models together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tessera.optim.keyed import KeyedOptimizer, _tell

__all__ = [
    "SEMISYNC_GLOBAL_STEP_COUNTER_KEY",
    "SEMISYNC_LOCAL_STEP_COUNTER_KEY",
    "SEMI_SYNC_GLOBAL_OPTIM_KEY",
    "SEMI_SYNC_GLOBAL_STATE_KEY",
    "SEMI_SYNC_LOCAL_OPTIM_KEY",
    "SEMI_SYNC_LOCAL_STATE_KEY",
    "SemisyncOptimizer",
]

SEMI_SYNC_GLOBAL_OPTIM_KEY = "semi_sync_global_optim"
SEMI_SYNC_LOCAL_OPTIM_KEY = "semi_sync_local_optim"
SEMI_SYNC_GLOBAL_STATE_KEY = "semi_sync_global_"
SEMI_SYNC_LOCAL_STATE_KEY = "semi_sync_local_"
SEMISYNC_GLOBAL_STEP_COUNTER_KEY = "__semisync_global_step_counter__"
SEMISYNC_LOCAL_STEP_COUNTER_KEY = "__semisync_local_step_counter__"


def _tensors(params: Iterable) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for each in params:
        found.extend(each["params"] if isinstance(each, dict) else [each])
    return found


class SemisyncOptimizer(KeyedOptimizer):
    """Step `optimizer` at every call, and `global_optimizer` at every `num_local_steps`-th.

    Its state is that of both, under names that begin with `semi_sync_local_` and `semi_sync_global_`, with
    the two counts of steps beside the state of each global parameter. The arguments after `num_local_steps`
    are accepted and change nothing.
    """

    def __init__(
        self,
        global_params: Iterable,
        optimizer: KeyedOptimizer,
        global_optimizer: KeyedOptimizer,
        num_local_steps: int = 16,
        semi_sync_worker_shard_group: dist.ProcessGroup | None = None,
        offload_global_model: bool = False,
        non_blocking: bool = False,
    ) -> None:
        if num_local_steps < 1:
            raise ValueError(
                f"optim.semi_sync: num_local_steps is {num_local_steps}; it has to be 1 or more."
            )
        if not hasattr(getattr(global_optimizer, "_optimizer", None), "global_step"):
            raise TypeError(
                "optim.semi_sync: the global optimizer has to be a KeyedOptimizer around one with "
                f"global_step; it is a {type(global_optimizer).__name__}."
            )
        self._optimizer = optimizer
        self._global_optimizer = global_optimizer
        self._worker_model_params = _tensors(global_params)
        self._num_local_steps = num_local_steps
        self._local_step_counter = torch.tensor(0)
        self._global_step_counter = torch.tensor(0)
        self._start({})

    def _both(self) -> list[tuple[str, KeyedOptimizer]]:
        return [("", self._optimizer), ("", self._global_optimizer)]

    def _counts(self) -> dict[str, torch.Tensor]:
        return {
            SEMISYNC_GLOBAL_STEP_COUNTER_KEY: self._global_step_counter,
            SEMISYNC_LOCAL_STEP_COUNTER_KEY: self._local_step_counter,
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of both; their learning rates may be changed."""
        return [group for _, optimizer in self._both() for group in optimizer.param_groups]

    @property
    def params(self) -> dict[str, torch.Tensor | ShardedTensor]:
        """Return the parameters of both by name, and the counts of steps."""
        found = dict(self._optimizer.params)
        for name, param in self._global_optimizer.params.items():
            if found.setdefault(name, param) is not param:
                raise ValueError(
                    f"optim.semi_sync: the two optimizers have different tensors named {name!r}."
                )
        return {**found, **self._counts()}

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Return the state of both by parameter."""
        found: dict[Any, dict[str, Any]] = {}
        for prefix, optimizer in (
            (SEMI_SYNC_LOCAL_STATE_KEY, self._optimizer),
            (SEMI_SYNC_GLOBAL_STATE_KEY, self._global_optimizer),
        ):
            for param, entries in optimizer.state.items():
                own = found.setdefault(param, {})
                own.update({f"{prefix}{name}": value for name, value in entries.items()})
                if optimizer is self._global_optimizer:
                    own.update(self._counts())
        return found

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a local step, and a global one if it is time. Then it is collective."""
        self._local_step_counter.add_(1)
        self._optimizer.step(closure)
        if self._local_step_counter.item() % self._num_local_steps == 0:
            self._global_step_counter.add_(1)
            self._global_optimizer.zero_grad()
            self._global_optimizer._optimizer.global_step(self._local_step_counter, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for _, optimizer in self._both():
            optimizer.zero_grad(set_to_none=set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy in place. Raise RuntimeError if the counts of steps are missing."""
        given = state_dict["state"].values()
        missing = [name for name in self._counts() if not any(name in entries for entries in given)]
        if missing:
            raise RuntimeError(f"optim.semi_sync: the state has no {missing[0]}.")
        super().load_state_dict(state_dict)
        # What is no tensor was put into the combined state, which is made anew at every call.
        by_name = state_dict["state"]
        for prefix, optimizer in (
            (SEMI_SYNC_LOCAL_STATE_KEY, self._optimizer),
            (SEMI_SYNC_GLOBAL_STATE_KEY, self._global_optimizer),
        ):
            for name, param in optimizer.params.items():
                for entry, value in optimizer.state.get(param, {}).items():
                    if not isinstance(value, (torch.Tensor, ShardedTensor)):
                        optimizer.state[param][entry] = by_name[name][f"{prefix}{entry}"]

    def post_load_state_dict(self) -> None:
        """Let each do what is left to do."""
        for _, optimizer in self._both():
            optimizer.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:
        """Put groups of parameters into the state from now on, or leave them out."""
        self.defaults["_save_param_groups"] = save
        for _, optimizer in self._both():
            optimizer.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        """Tell the number of the step to those that want to know."""
        _tell(self._both(), "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Tell new numbers to those that want to know."""
        _tell(self._both(), "update_hyper_parameters", params_dict)
