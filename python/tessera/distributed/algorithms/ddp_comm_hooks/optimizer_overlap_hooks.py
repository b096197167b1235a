"""Parameters that take their step as soon as their bucket has been averaged."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from tessera import _C
from tessera.distributed.algorithms.ddp_comm_hooks._native import Hook, native_hook, run

__all__ = ["OptimizerState", "optimizer_hook"]

_OPTIMIZERS = {"sgd": _C.sgd_in_backward, "adam": _C.adam_in_backward, "adamw": _C.adamw_in_backward}


class OptimizerState:
    """An optimizer ("sgd", "adam", "adamw") that runs in backward, with torch's arguments.

    Gradients are first reduced by `hook` with `state`; without one, averaged. With `only`, just the
    parameters of these names are stepped and gradients stay; otherwise gradients are None after
    backward.

    >>> OptimizerState("adamw", lr=1e-3, betas=(0.9, 0.95)).lr
    0.001
    """

    def __init__(
        self,
        optimizer: str,
        *,
        hook: Hook | None = None,
        state: Any = None,
        only: Iterable[str] | None = None,
        **options: Any,
    ):
        if optimizer not in _OPTIMIZERS:
            raise ValueError(f"OptimizerState: '{optimizer}' is none of 'sgd', 'adam', 'adamw'.")
        self.optimizer = _OPTIMIZERS[optimizer](**options)
        inner = native_hook(state, hook) if hook is not None else _C.all_reduce_hook()
        self.native = self._stepping(inner, set(only) if only is not None else None)
        self.runner = _C.HookRunner(self.native)

    def _stepping(self, inner: _C.CommHook, only: set[str] | None) -> _C.CommHook:
        return _C.hook_then_optimizer(inner, self.optimizer, only)

    @property
    def lr(self) -> float:
        """The learning rate; set it between steps."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.lr = value

    def state_dict(self) -> dict:
        """Return what the optimizer and the hook remember, by parameter name."""
        tensors, numbers = self.native.state()
        return {"tensors": tensors, "numbers": numbers}

    def load_state_dict(self, saved: dict) -> None:
        self.native.load_state((saved["tensors"], saved["numbers"]))


def optimizer_hook(state: OptimizerState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce the bucket, then step its parameters while backward goes on."""
    return run(state.runner, bucket, None)


optimizer_hook.__tessera_native__ = lambda state: state.native
