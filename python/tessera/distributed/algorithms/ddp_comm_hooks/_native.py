"""Between hooks as Python functions and hooks as C++ objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tessera import _C

Hook = Callable[[Any, Any], torch.futures.Future]


def native_hook(state: Any, hook: Hook) -> _C.CommHook:
    """Return the C++ object behind `hook` with `state`, or one that calls `hook` from C++."""
    native = _native_or_none(state, hook)
    return native if native is not None else _C.python_hook(state, hook, name_of(hook))


def name_of(hook: Hook) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _native_or_none(state: Any, hook: Hook) -> _C.CommHook | None:
    make = getattr(hook, "__tessera_native__", None)
    return make(state) if make is not None else None


def run(runner: _C.HookRunner, bucket: Any, group: dist.ProcessGroup | None) -> torch.futures.Future:
    """Run a C++ hook on a bucket of ours or of torch's."""
    if isinstance(bucket, _C.GradBucket):
        return runner.run(bucket, group)
    group = group if group is not None else dist.group.WORLD
    return runner.run_torch(bucket, group).then(_value)  # torch wants a Python object in the future


def _value(future: torch.futures.Future) -> torch.Tensor:
    return future.value()
