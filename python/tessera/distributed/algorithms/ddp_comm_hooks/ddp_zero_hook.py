"""Each rank steps its share of the parameters, and alone remembers what that takes (ZeRO, stage 1)."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim.utils import functional_optim_map

from tessera import _C
from tessera.distributed.algorithms.ddp_comm_hooks._native import Hook, run
from tessera.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import OptimizerState

__all__ = ["ZeroStepState", "hook_with_zero_step", "hook_with_zero_step_interleaved", "zero_step_hook"]

_NAMES = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}


class ZeroStepState(OptimizerState):
    """An `OptimizerState` whose work and memory the ranks share, parameter by parameter.

    Once a step was taken, `state_dict` is collective and gives every rank the state of all, which
    `load_state_dict` shares out again, also over another number of ranks.

    >>> ZeroStepState("adamw", lr=1e-3).lr
    0.001
    """

    def __init__(self, optimizer: str, *, hook: Hook | None = None, state: Any = None, **options: Any):
        super().__init__(optimizer, hook=hook, state=state, **options)

    def _stepping(self, inner: _C.CommHook, only: set[str] | None) -> _C.CommHook:
        return _C.hook_then_zero_step(inner, self.optimizer)


def zero_step_hook(state: ZeroStepState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce the bucket, then let the owners step its parameters; all have them after backward."""
    return run(state.runner, bucket, None)


zero_step_hook.__tessera_native__ = lambda state: state.native


def hook_with_zero_step(hook: Hook, ddp: Any, zero: Any, shard_buckets: bool = False) -> Hook:
    """Return a hook that reduces with `hook` and then takes the step of `zero`.

    `zero` is a `torch.distributed.optim.ZeroRedundancyOptimizer` of SGD, Adam or AdamW made with
    `overlap_with_ddp=True`; its options are read here, once. The returned hook's `step_state` is a
    `ZeroStepState`, whose `lr` may be set between steps. Parameters are always shared out by size,
    inside buckets too, so `shard_buckets` changes nothing. Any engine serves, not NCCL alone.
    """
    del ddp, shard_buckets
    if not getattr(zero, "_overlap_with_ddp", False):
        raise ValueError("hook_with_zero_step: the optimizer was not made with overlap_with_ddp=True.")
    made_by = zero._optim_constructor
    names = [name for plain, name in _NAMES.items() if made_by in (plain, functional_optim_map[plain])]
    if not names:
        raise ValueError(
            f"hook_with_zero_step: {made_by.__name__} cannot step in backward. SGD, Adam and AdamW can."
        )
    step_state = ZeroStepState(names[0], hook=hook, **zero._optim_defaults)

    def hook_then_zero_step(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return run(step_state.runner, bucket, None)

    hook_then_zero_step.__tessera_native__ = lambda state: step_state.native
    hook_then_zero_step.step_state = step_state
    return hook_then_zero_step


def hook_with_zero_step_interleaved(hook: Hook, ddp: Any, zero: Any, shard_buckets: bool = False) -> Hook:
    """Return the hook of `hook_with_zero_step`: it steps each bucket as soon as it is reduced."""
    return hook_with_zero_step(hook, ddp, zero, shard_buckets)
