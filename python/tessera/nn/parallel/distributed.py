"""Data parallelism: every rank holds the model and sees other samples; gradients are averaged."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim.apply_optimizer_in_backward import param_to_acc_grad_map
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn import Module
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.distributed import (
    _BufferCommHookLocation,
    _dump_DDP_relevant_env_vars,
    _find_tensors,
    _MixedPrecision,
)

from tessera import _C
from tessera.nn.parallel._arguments import (
    delayed_names,
    devices_of,
    group_of,
    parameters_of,
    warn_of_broadcast_buffers,
)
from tessera.nn.parallel._hook_methods import HookMethods
from tessera.nn.parallel._library_methods import LibraryMethods
from tessera.nn.parallel._outputs import map_tensors

__all__ = ["DistributedDataParallel"]

# Scripts and libraries import these from torch's module of the same name.
_SAME_AS_TORCH = (_BufferCommHookLocation, _MixedPrecision, _dump_DDP_relevant_env_vars, _find_tensors)

_UNINITIALIZED = (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)


class _DDPJoinHook(JoinHook):
    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool):
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        ddp._logged["join_uneven_inputs"] = 1

    def main_hook(self):
        self.ddp._replica.shadow_iteration(self.ddp._divide_by_initial_world_size)

    def post_hook(self, is_last_joiner: bool):
        self.ddp._authoritative_rank = self.ddp._replica.finish_join(is_last_joiner)


class DistributedDataParallel(HookMethods, LibraryMethods, TorchDistributedDataParallel):
    """Keep the parameters of a module equal on all ranks of a group.

    Calling it runs the module; backward then averages the gradients over the ranks while it runs.
    Arguments, methods, errors and `state_dict` keys are those of
    `torch.nn.parallel.DistributedDataParallel`, so that replacing the import is enough; the engine is
    C++. What differs, and why, is in docs/deviations.md.

    Collective: all ranks construct it, call it and run backward equally often; `no_sync` and `join`
    are the exceptions.

    `automatic_graph`, `divisor`, `overlap` and `direct_gradients` are ours: watch a few iterations
    and choose between `find_unused_parameters`, `static_graph` and neither; divide sums by something
    else than the number of ranks; reduce beside backward or in it (unset: beside it where ranks have
    two cores); with `gradient_as_bucket_view`, compute large gradients in their buckets.
    """

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, Tensor]] | None = None,
        param_to_hook_all_reduce: Tensor | None = None,
        mixed_precision: Any | None = None,
        device_mesh: Any | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        automatic_graph: bool = False,
        divisor: float | None = None,
        overlap: bool | None = None,
        direct_gradients: bool = True,
    ):
        # Not torch's: it would build torch's engine.
        Module.__init__(self)
        Joinable.__init__(self)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        self.process_group = group_of(process_group, device_mesh, module)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        if broadcast_buffers is not None:
            warn_of_broadcast_buffers(forward_sync_buffers is not None)
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` "
                "module is deprecated. Please avoid using it.",
                FutureWarning,
                stacklevel=2,
            )
        self.module = module
        self.dim = dim
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        caps = bucket_cap_mb_list or [25 if bucket_cap_mb is None else bucket_cap_mb]
        self.bucket_bytes_cap = int(max(caps) * 1024 * 1024)  # where torch.compile cuts its graphs
        self.bucket_bytes_cap_list = [int(cap * 1024 * 1024) for cap in bucket_cap_mb_list or ()]
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._settings = {
            "broadcast_buffers": broadcast_buffers,
            "forward_sync_buffers": forward_sync_buffers,
            "init_sync": init_sync,
            "bucket_cap_mb": bucket_cap_mb,
            "bucket_cap_mb_list": list(bucket_cap_mb_list or ()),
            "find_unused_parameters": find_unused_parameters,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "static_graph": static_graph,
            "automatic_graph": automatic_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "batched_grad_copy": batched_grad_copy,
            "divisor": divisor,
            "overlap": overlap,
            "direct_gradients": direct_gradients,
            "ignored": sorted(self._ignored),
            "device_ids": devices_of(device_ids),
            "output_device": None if output_device is None else devices_of([output_device])[0],
        }
        if delay_all_reduce_named_params is not None:
            delayed, trigger = delayed_names(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
            self._settings["delay_all_reduce_named_params"] = delayed
            self._settings["param_to_hook_all_reduce"] = trigger
        self._start()
        single = bool(device_ids) and self.device.type != "cpu"
        self.device_ids = [devices_of(device_ids)[0].index] if single else None
        self.output_device = None
        if single:
            where = device_ids[0] if output_device is None else output_device
            self.output_device = devices_of([where])[0].index
        self._set_mixed_precision()
        self._is_asked = self.bucket_bytes_cap >= dist._DEFAULT_FIRST_BUCKET_BYTES
        self._is_plain = self._is_asked and not self.device_ids and mixed_precision is None
        self._used_gradients: tuple[Tensor, ...] = ()
        self._set_optimizers_in_backward()

    def _start(self):
        module = self.module
        parameters = parameters_of(module)
        kept = [p for name, p, _ in parameters if name not in self._ignored]
        alive = weakref.ref(module)

        def buffers():
            owner = alive()
            return [] if owner is None else list(owner.named_buffers())

        self._replica = _C.Replica(
            type(module).__name__,
            parameters,
            buffers,
            any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()),
            any(isinstance(tensor, _UNINITIALIZED) for tensor in kept),
            self.process_group,
            _C.DataParallelOptions(**self._settings),
        )
        self._module_parameters = kept
        self.device = kept[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in kept}) > 1
        self._divide_by_initial_world_size = True
        self._comm_hooks: list[tuple[Callable, object]] = []
        self._logged: dict[str, str | int] = {}  # of the logging data, what the engine does not know
        self._stepped_in_backward: dict[str, Tensor] | None = None
        self._num_taken_optimizers = 0

    def _set_mixed_precision(self):
        precision = self.mixed_precision
        if precision is None:
            return
        if precision.buffer_dtype is not None:
            for name, buffer in self.module.named_buffers():
                if name not in self._ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(precision.buffer_dtype)
        if precision.reduce_dtype is not None:
            self._replica.register_comm_hook(_C.compress_hook(precision.reduce_dtype))

    # ---- one iteration ----

    def forward(self, *inputs, **kwargs):
        if torch.autograd._profiler_enabled():
            with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs, kwargs):
        # Not empty once somebody has called _apply_optimizer_in_backward.
        if param_to_acc_grad_map.data:
            self._set_optimizers_in_backward()
        if not self._is_plain or self._used_gradients or self._join_config.enable:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
        # The same for most models, without the calls that do nothing for them.
        replica = self._replica
        replica.before_forward()
        outer = TorchDistributedDataParallel._active_ddp_module
        TorchDistributedDataParallel._active_ddp_module = self
        try:
            output = self._modules["module"](*inputs, **kwargs)
        finally:
            TorchDistributedDataParallel._active_ddp_module = outer
        return replica.after_forward([output])[0] if type(output) is Tensor else self._post_forward(output)

    def _pre_forward(self, *inputs, **kwargs):
        # Averages that an optimizer in backward has used must not be added to.
        if self._used_gradients:
            for parameter in self._used_gradients:
                parameter.grad = None
            self._used_gradients = ()
        if self._join_config.enable:
            Join.notify_join_context(self)
            self._replica.before_forward_joined(self._divide_by_initial_world_size)
        else:
            self._replica.before_forward()
        if self.device_ids:
            moved, moved_kwargs = _to_kwargs(
                inputs, kwargs, torch.device(self.device_type, self.device_ids[0]), True
            )
            return moved[0], moved_kwargs[0]
        return inputs, kwargs

    def _run_ddp_forward(self, *inputs, **kwargs):
        # torch.compile asks torch's class, and cuts graphs where buckets end. Small ones it refuses.
        outer = TorchDistributedDataParallel._active_ddp_module
        TorchDistributedDataParallel._active_ddp_module = self if self._is_asked else None
        try:
            dtype = None if self.mixed_precision is None else self.mixed_precision.param_dtype
            if dtype is None:
                return self.module(*inputs, **kwargs)
            inputs, kwargs = _cast_forward_inputs(dtype, *inputs, **kwargs)
            # Gradients flow back through the cast into the parameters themselves, in their own type.
            rounded = {
                name: parameter.to(dtype)
                for name, parameter in self.module.named_parameters()
                if name not in self._ignored and parameter.is_floating_point()
            }
            return torch.func.functional_call(self.module, rounded, inputs, kwargs)
        finally:
            TorchDistributedDataParallel._active_ddp_module = outer

    def _post_forward(self, output):
        if isinstance(output, Tensor):
            return self._replica.after_forward([output])[0]
        if not torch.is_grad_enabled() or not self._replica.require_backward_grad_sync:
            self._replica.after_forward([])
            return output
        tensors: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        map_tensors(output, collect)
        replaced = self._replica.after_forward(tensors)
        if all(new is old for new, old in zip(replaced, tensors, strict=True)):
            return output
        remaining = iter(replaced)
        return map_tensors(output, lambda _: next(remaining))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of forwards made inside local; the next synchronised backward reduces their sum."""
        outer = self._replica.require_backward_grad_sync
        self._replica.require_backward_grad_sync = False
        try:
            yield
        finally:
            self._replica.require_backward_grad_sync = outer

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ):
        """Return a context in which ranks may have different numbers of batches."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs) -> JoinHook:
        return _DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def __getstate__(self):
        self._check_default_group()
        left_out = ("process_group", "_replica", "_join_config", "_comm_hooks", "_stepped_in_backward")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state):
        Module.__setstate__(self, state)
        Joinable.__init__(self)
        self.process_group = group_of(None, None, self.module)
        self._settings = {**self._settings, "init_sync": False}
        self._start()
        self._set_mixed_precision()
        self._used_gradients = ()
        self._set_optimizers_in_backward()
