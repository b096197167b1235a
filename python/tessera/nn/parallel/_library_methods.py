"""What training scripts and libraries ask of DistributedDataParallel, beside training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.utils import _to_kwargs
from torch.nn import Module
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from tessera import _C

# Steps of torch's own engine, which a subclass inherits by name. Here they are C++ and not steps.
_STEPS_OF_TORCH = (
    "_check_and_sync_module_buffers",
    "_check_global_requires_backward_grad_sync",
    "_check_sync_bufs_post_fwd",
    "_check_sync_bufs_pre_fwd",
    "_clear_grad_buffer",
    "_ddp_init_helper",
    "_delayed_all_reduce_hook",
    "_fire_reducer_autograd_hook",
    "_lazy_init",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_module_wait_for_copy_hook",
    "_passing_sync_batchnorm_handle",
    "_register_accum_grad_hook",
    "_register_delay_all_reduce_hook",
    "_root_copy_hook",
    "_setup_in_backward_optimizers",
    "_sync_final_model",
    "_sync_module_buffers",
)


class _Reducer:
    """What libraries call on the reducer of torch's wrapper."""

    def __init__(self, replica: _C.Replica):
        self._replica = replica

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Reduce the gradients of the next backward, although its forward was made in `no_sync`."""
        self._replica.prepare_for_backward(list(outputs))

    def _get_local_used_map(self) -> Tensor:
        """Return on how many ranks the last backward used each parameter, if it looked for unused ones."""
        return self._replica.used_map()

    def _ddp_graph_static(self) -> bool:
        """Return whether every backward so far used the same parameters."""
        return self._replica.is_graph_static()


class LibraryMethods:
    """Flags, figures, and the names of torch's wrapper that others call."""

    @property
    def require_backward_grad_sync(self) -> bool:
        return self._replica.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._replica.require_backward_grad_sync = value

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next training forward sends buffers, if there are any to send."""
        return self._replica.require_forward_param_sync

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._replica.require_forward_param_sync = value

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of parameters and buffers that buckets leave out: ignored, or reduced by a delayed call."""
        return self._ignored | set(self._settings.get("delay_all_reduce_named_params", ()))

    @property
    def reducer(self) -> _Reducer:
        return _Reducer(self._replica)

    @property
    def find_unused_parameters(self) -> bool:
        return self._replica.options.find_unused_parameters

    @property
    def static_graph(self) -> bool:
        return self._replica.options.static_graph

    @property
    def forward_sync_buffers(self) -> bool:
        forward, broadcast = (self._settings[n] for n in ("forward_sync_buffers", "broadcast_buffers"))
        return forward if forward is not None else broadcast is not False

    broadcast_buffers = forward_sync_buffers

    def will_sync_module_buffers(self) -> bool:
        """Say whether a training forward sends rank 0's buffers first."""
        return self.forward_sync_buffers and any(
            name not in self._ignored for name, _ in self.module.named_buffers()
        )

    def _sync_buffers(self) -> None:
        """Send rank 0's buffers to all ranks now: before all of them evaluate. Collective.

        Forwards without gradients leave buffers alone, so that one rank may evaluate by itself.
        """
        self._replica.sync_buffers()

    def scatter(self, inputs, kwargs, device_ids):
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs, kwargs, device_id):
        return _to_kwargs(inputs, kwargs, torch.device(self.device_type, device_id), True)

    def gather(self, outputs, output_device):
        return gather(outputs, output_device, dim=self.dim)

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Set whether `find_unused_parameters` copies outputs; a loss must not change them if not."""
        self._replica.set_sink_clone(val)

    def _set_static_graph(self) -> None:
        """Declare, before the first forward, that every iteration uses the same parameters equally often."""
        try:
            self._replica.set_static_graph()
        except RuntimeError as error:
            self._replica.log_error(str(error))
            raise
        self._settings["static_graph"] = True

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        data = {**self._replica.logging_data(), **self._logged}
        if data.get("backend_name") == "custom":  # what torch calls all backends but its own
            data["backend_name"] = dist.get_backend(self.process_group)
        return data

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether the buckets are in the order in which gradients arrive."""
        return bool(self._replica.logging_data().get("has_rebuilt_buckets", 0))

    def _default_broadcast_coalesced(self, bufs=None, bucket_size=None, authoritative_rank: int = 0) -> None:
        """Send a rank's tensors, by default all buffers, to all ranks now. Collective."""
        if bufs is None:
            bufs = [b for name, b in self.module.named_buffers() if name not in self._ignored]
        if bucket_size is None:
            bucket_size = self.broadcast_bucket_size
        dist._broadcast_coalesced(self.process_group, bufs, bucket_size, authoritative_rank)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(
                ValueError, "DDP runtime logging sample rate should be equal or greater than 1"
            )
        self._replica.set_sample_rate(sample_rate)

    def overlap_report(self) -> dict[str, Any]:
        """Return seconds of the last synchronised iteration, exposed communication, and advice."""
        return self._replica.overlap_report()

    def _remove_autograd_hooks(self) -> None:
        self._replica.remove_autograd_hooks()

    def _check_reducer_finalized(self) -> None:
        self._replica.check_finalized()

    def _set_sparse_metadata(self, global_unique_ids: dict[str, Tensor]) -> None:
        self._replica.set_sparse_metadata(global_unique_ids)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Continue on other ranks; drops a backward that was cut short."""
        self._replica.reset()
        if dist.get_rank(new_process_group) < 0:
            return
        self.process_group = new_process_group
        self._replica.update_process_group(new_process_group)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, parameter in module.named_parameters():
            if name in params_and_buffers_to_ignore:
                parameter._ddp_ignored = True
        for name, buffer in module.named_buffers():
            if name in params_and_buffers_to_ignore:
                buffer._ddp_ignored = True

    @staticmethod
    def _get_data_parallel_params(module: Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the parameters that are not ignored, with their names if asked."""
        for name, parameter in module.named_parameters():
            if not getattr(parameter, "_ddp_ignored", False):
                yield (name, parameter) if named_params else parameter

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        self._replica.log_error(f"{err_type}: {err_msg}")
        raise err_type(err_msg)


def _not_a_step(name: str):
    def refuse(self, *args, **kwargs) -> NoReturn:
        raise NotImplementedError(
            f"DistributedDataParallel.{name} is a step of torch's own engine; tessera's does this in C++."
        )

    refuse.__name__ = name
    return refuse


for _name in _STEPS_OF_TORCH:
    setattr(LibraryMethods, _name, _not_a_step(_name))
