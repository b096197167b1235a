"""Averaging, plainly or in 16 bits: the names of torch's default_hooks."""

from typing import Any

import torch
import torch.distributed as dist

from tessera import _C
from tessera.distributed.algorithms.ddp_comm_hooks._native import Hook, name_of, native_hook, run

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

_all_reduce = _C.HookRunner(_C.all_reduce_hook())
_fp16 = _C.HookRunner(_C.compress_hook(torch.float16))
_bf16 = _C.HookRunner(_C.compress_hook(torch.bfloat16))


def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket as it is."""
    return run(_all_reduce, bucket, process_group)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in float16 and return the bucket's own type."""
    return run(_fp16, bucket, process_group)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in bfloat16, on any backend, and return the bucket's own type."""
    return run(_bf16, bucket, process_group)


# A group other than the model's own has to come along from Python.
allreduce_hook.__tessera_native__ = lambda state: _C.all_reduce_hook() if state is None else None
fp16_compress_hook.__tessera_native__ = lambda state: (
    _C.compress_hook(torch.float16) if state is None else None
)
bf16_compress_hook.__tessera_native__ = lambda state: (
    _C.compress_hook(torch.bfloat16) if state is None else None
)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Cast buckets to float16 before `hook`, and its result back after."""
    return _wrapper(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Cast buckets to bfloat16 before `hook`, and its result back after."""
    return _wrapper(hook, torch.bfloat16)


def _wrapper(hook: Hook, dtype: torch.dtype) -> Hook:
    def wrapped(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        full = bucket.buffer()
        bucket.set_buffer(full.to(dtype))
        future = hook(state, bucket)
        bucket.set_buffer(full)
        return future.then(lambda done: full.copy_(done.value()))

    wrapped.__qualname__ = f"{str(dtype).removeprefix('torch.')}_wrapper({name_of(hook)})"
    if hasattr(hook, "__tessera_native__"):
        wrapped.__tessera_native__ = lambda state: (  # type: ignore[attr-defined]
            _C.compress_wrapper(native_hook(state, hook), dtype)
            if hook.__tessera_native__(state) is not None
            else None
        )
    return wrapped
