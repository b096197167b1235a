"""Hooks that look at gradients on their way: are they finite, clipped, the same bits every time."""

from typing import Any

import torch
import torch.distributed as dist

from tessera import _C
from tessera.distributed.algorithms.ddp_comm_hooks._native import Hook, native_hook, run

__all__ = [
    "FiniteCheckState",
    "GradientClippingState",
    "deterministic_hook",
    "finite_check_hook",
    "gradient_clipping_hook",
]


class FiniteCheckState:
    """What to do about a NaN or an infinity: "raise" on all ranks, "skip" the step, "zero" that rank.

    Gradients are then reduced by `hook` with `state`; without one, averaged.
    """

    def __init__(self, policy: str = "raise", hook: Hook | None = None, state: Any = None):
        inner = native_hook(state, hook) if hook is not None else _C.all_reduce_hook()
        self.native = _C.finite_check_hook(inner, policy)
        self.runner = _C.HookRunner(self.native)

    @property
    def skip_step(self) -> bool:
        """True if the last backward's gradients should not be stepped. The same on all ranks."""
        return self.native.skip_step

    @property
    def found(self) -> list[tuple[int, str, str]]:
        """(rank, parameter, "NaN" or "infinity") of the last step. The same on all ranks."""
        return self.native.found


def finite_check_hook(state: FiniteCheckState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Look for numbers that are not finite before they are sent, and tell all ranks whose they were."""
    return run(state.runner, bucket, None)


class GradientClippingState:
    """Clip by the norm of the whole averaged gradient, as torch.nn.utils.clip_grad_norm_ would."""

    def __init__(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        hook: Hook | None = None,
        state: Any = None,
    ):
        inner = native_hook(state, hook) if hook is not None else _C.all_reduce_hook()
        self.native = _C.clipping_hook(inner, max_norm, norm_type, error_if_nonfinite)
        self.runner = _C.HookRunner(self.native)

    @property
    def total_norm(self) -> float:
        """Norm of the last step's averaged gradient before clipping."""
        return self.native.total_norm


def gradient_clipping_hook(
    state: GradientClippingState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average, take norms as buckets arrive, and clip at the end of backward."""
    return run(state.runner, bucket, None)


_deterministic = _C.HookRunner(_C.deterministic_hook())


def deterministic_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in rank order: the same bits whatever the size of the buckets."""
    return run(_deterministic, bucket, process_group)


finite_check_hook.__tessera_native__ = lambda state: state.native
gradient_clipping_hook.__tessera_native__ = lambda state: state.native
deterministic_hook.__tessera_native__ = lambda state: _C.deterministic_hook() if state is None else None
