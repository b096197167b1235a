"""Eight bits per gradient: the names of torch's quantization_hooks, and one with error feedback."""

import torch
import torch.distributed as dist

from tessera import _C
from tessera.distributed.algorithms.ddp_comm_hooks._native import run

__all__ = [
    "Int8ErrorFeedbackState",
    "int8_error_feedback_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

_per_tensor = _C.HookRunner(_C.quantization_per_tensor_hook())
_per_channel: dict[int, _C.HookRunner] = {}


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Gather all ranks' buckets as bytes, one scale per bucket, and average them."""
    return run(_per_tensor, bucket, process_group)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Gather all ranks' buckets as bytes, one scale per `bucket_size` elements, and average them."""
    if bucket_size not in _per_channel:
        _per_channel[bucket_size] = _C.HookRunner(_C.quantization_per_channel_hook(bucket_size))
    return run(_per_channel[bucket_size], bucket, process_group)


quantization_pertensor_hook.__tessera_native__ = lambda state: (
    _C.quantization_per_tensor_hook() if state is None else None
)
quantization_perchannel_hook.__tessera_native__ = lambda state: (
    _C.quantization_per_channel_hook(512) if state is None else None
)


class Int8ErrorFeedbackState:
    """What rounding to bytes has lost, by parameter; added to the next step's gradients."""

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        self.process_group = process_group
        self.native = _C.int8_error_feedback_hook()
        self.runner = _C.HookRunner(self.native)

    def __getstate__(self) -> dict:
        return {"state": self.native.state()}

    def __setstate__(self, saved: dict) -> None:
        Int8ErrorFeedbackState.__init__(self)
        self.native.load_state(saved["state"])


def int8_error_feedback_hook(
    state: Int8ErrorFeedbackState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Gather all ranks' buckets as signed bytes, one scale per parameter; nothing is lost for good."""
    return run(state.runner, bucket, state.process_group)


int8_error_feedback_hook.__tessera_native__ = lambda state: (
    state.native if state.process_group is None else None
)
