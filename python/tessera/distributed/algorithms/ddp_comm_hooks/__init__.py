"""Communication hooks: how the gradients of a bucket become their average.

A hook is a function of a state and a bucket that returns a future of the averaged buffer. Those here
run in C++, and work with `tessera.nn.parallel.DistributedDataParallel` and with torch's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from tessera._lazy import submodule
from tessera.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from tessera.distributed.algorithms.ddp_comm_hooks._native import Hook, native_hook

__all__ = ["DDPCommHookType", "native_hook", "register_ddp_comm_hook"]


@dataclass(frozen=True)
class _Registration:
    """Register a hook with a model. PowerSGD makes its own state around the process group."""

    hook: Hook
    power_sgd_rank: int | None = None

    def __call__(self, model: Any, state: Any, **options: Any) -> None:
        if self.power_sgd_rank is not None:
            options = {"matrix_approximation_rank": self.power_sgd_rank, **options}
            state = powerSGD_hook.PowerSGDState(state, **options)
        model.register_comm_hook(state, self.hook)


class DDPCommHookType(Enum):
    """Name the hooks; `register_ddp_comm_hook` takes such a name."""

    ALLREDUCE = _Registration(default_hooks.allreduce_hook)
    FP16_COMPRESS = _Registration(default_hooks.fp16_compress_hook)
    BF16_COMPRESS = _Registration(default_hooks.bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _Registration(quantization_hooks.quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _Registration(quantization_hooks.quantization_perchannel_hook)
    POWER_SGD = _Registration(powerSGD_hook.powerSGD_hook, 1)
    POWER_SGD_RANK2 = _Registration(powerSGD_hook.powerSGD_hook, 2)
    BATCHED_POWER_SGD = _Registration(powerSGD_hook.batched_powerSGD_hook, 1)
    BATCHED_POWER_SGD_RANK2 = _Registration(powerSGD_hook.batched_powerSGD_hook, 2)
    NOOP = _Registration(debugging_hooks.noop_hook)


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: Any, state: Any = None) -> None:
    """Register the hook of this name with a model. `state` is a process group, or None for the world."""
    comm_hook_type.value(model=model, state=state)


__getattr__ = partial(submodule, __name__)
