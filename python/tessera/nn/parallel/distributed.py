"""Data parallelism: every rank holds the model and sees other samples; gradients are averaged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn import Module
from torch.nn.parallel.distributed import (
    _BufferCommHookLocation,
    _dump_DDP_relevant_env_vars,
    _find_tensors,
    _MixedPrecision,
)
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs
from torch.utils import _pytree

from tessera import _C
from tessera.distributed.algorithms.ddp_comm_hooks._native import native_hook

__all__ = ["DistributedDataParallel"]

# Scripts and libraries import these from torch's module of the same name.
_SAME_AS_TORCH = (_BufferCommHookLocation, _MixedPrecision, _dump_DDP_relevant_env_vars, _find_tensors)

_UNINITIALIZED = (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)


def _map_tensors(value: Any, visit: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with every tensor in it replaced.

    Dataclasses, and classes made from dict and list, are changed in place.
    """
    if isinstance(value, Tensor):
        return visit(value)
    leaves, spec = _pytree.tree_flatten(value)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[i] = visit(leaf)
        elif isinstance(leaf, (dict, list)):
            for key in list(leaf) if isinstance(leaf, dict) else range(len(leaf)):
                new = _map_tensors(leaf[key], visit)
                if new is not leaf[key]:
                    leaf[key] = new
        elif isinstance(leaf, tuple):
            leaves[i] = tuple.__new__(type(leaf), [_map_tensors(element, visit) for element in leaf])
            if hasattr(leaf, "__dict__"):
                vars(leaves[i]).update(vars(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                object.__setattr__(leaf, field.name, _map_tensors(getattr(leaf, field.name), visit))
    return _pytree.tree_unflatten(leaves, spec)


def _parameters_of(module: Module) -> list[tuple[str, Tensor, bool]]:
    """Each parameter once, by its first name, and whether its gradient is sparse; no parts of tables."""
    seen: set[Tensor] = set()
    found = []
    for module_name, part in module.named_modules():
        is_sparse = isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
        for name, parameter in part.named_parameters(recurse=False):
            if parameter not in seen and not getattr(parameter, "_is_table_part", False):
                seen.add(parameter)
                found.append((f"{module_name}.{name}" if module_name else name, parameter, is_sparse))
    return found


class _DDPJoinHook(JoinHook):
    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool):
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self):
        self.ddp._replica.shadow_iteration(self.ddp._divide_by_initial_world_size)

    def post_hook(self, is_last_joiner: bool):
        self.ddp._replica.finish_join(is_last_joiner)


class DistributedDataParallel(Module, Joinable):
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

    _active_ddp_module: ClassVar[DistributedDataParallel | None] = None

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
        super().__init__()
        Joinable.__init__(self)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        self.process_group = _group_of(process_group, device_mesh, module)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        if broadcast_buffers is not None:
            _warn_of_broadcast_buffers(forward_sync_buffers is not None)
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
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._settings = {
            "broadcast_buffers": broadcast_buffers,
            "forward_sync_buffers": forward_sync_buffers,
            "init_sync": init_sync,
            "bucket_cap_mb": bucket_cap_mb,
            "bucket_cap_mb_list": None if bucket_cap_mb_list is None else list(bucket_cap_mb_list),
            "find_unused_parameters": find_unused_parameters,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "static_graph": static_graph,
            "automatic_graph": automatic_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "batched_grad_copy": batched_grad_copy,
            "divisor": divisor,
            "overlap": overlap,
            "direct_gradients": direct_gradients,
            "ignored": sorted(self.parameters_to_ignore),
            "device_ids": _device_names(device_ids),
            "output_device": None if output_device is None else _device_names([output_device]),
        }
        if delay_all_reduce_named_params is not None:
            names = {id(parameter): name for name, parameter, _ in _parameters_of(module)}
            for name, parameter in delay_all_reduce_named_params:
                if id(parameter) not in names:
                    raise ValueError(
                        f"delay_all_reduce_named_params: '{name}' is no parameter of the module."
                    )
            if id(param_to_hook_all_reduce) not in names:
                raise ValueError("param_to_hook_all_reduce is no parameter of the module.")
            self._settings["delay_all_reduce_named_params"] = [
                names[id(parameter)] for _, parameter in delay_all_reduce_named_params
            ]
            self._settings["param_to_hook_all_reduce"] = names[id(param_to_hook_all_reduce)]
        self._start()
        single = bool(device_ids) and self.device.type != "cpu"
        self.device_ids = [torch.device(_device_names(device_ids)[0]).index] if single else None
        self.output_device = None
        if single:
            where = device_ids[0] if output_device is None else output_device
            self.output_device = torch.device(_device_names([where])[0]).index
        self._set_mixed_precision()
        self._used_gradients: tuple[Tensor, ...] = ()
        self._set_optimizers_in_backward()

    def _start(self):
        module = self.module
        parameters = _parameters_of(module)
        kept = [p for name, p, _ in parameters if name not in self.parameters_to_ignore]
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
            self._settings,
        )
        self._module_parameters = kept
        self.device = kept[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in kept}) > 1
        self._divide_by_initial_world_size = True
        self._comm_hooks: list[tuple[Callable, object]] = []

    def _set_mixed_precision(self):
        precision = self.mixed_precision
        if precision is None:
            return
        if precision.buffer_dtype is not None:
            for name, buffer in self.module.named_buffers():
                if name not in self.parameters_to_ignore and buffer.is_floating_point():
                    buffer.data = buffer.to(precision.buffer_dtype)
        if precision.reduce_dtype is not None:
            self._replica.register_comm_hook(_C.compress_hook(precision.reduce_dtype))

    def _set_optimizers_in_backward(self):
        """Take over the optimizers that `_apply_optimizer_in_backward` gave to parameters."""
        stepped = {
            name: parameter
            for name, parameter, _ in _parameters_of(self.module)
            if name not in self.parameters_to_ignore and hasattr(parameter, "_in_backward_optimizers")
        }
        if not stepped:
            return
        # They would step by this rank's own gradient; from now on they get the average.
        for parameter in stepped.values():
            for handle in param_to_optim_hook_handle_map.get(parameter, ()):
                handle.remove()

        def step(names: list[str], gradients: list[Tensor]) -> None:
            for name, gradient in zip(names, gradients, strict=True):
                parameter = stepped.get(name)
                if parameter is None:
                    continue
                parameter.grad = gradient
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None

            self._used_gradients = leftover

        reduced = sum(p.requires_grad for p in self._module_parameters)
        is_all = len(stepped) == reduced
        leftover = () if is_all else tuple(stepped.values())
        hook = _C.hook_then_optimizer(
            _C.all_reduce_hook(), _C.python_in_backward(step), None if is_all else set(stepped)
        )
        self._replica.register_comm_hook(hook)

    # ---- one iteration ----

    def forward(self, *inputs, **kwargs):
        if torch.autograd._profiler_enabled():
            with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs, kwargs):
        # Averages that an optimizer in backward has used must not be added to.
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
            inputs, kwargs = moved[0], moved_kwargs[0]
        outer = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = self
        try:
            output = self._run(inputs, kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = outer
        return self._after(output)

    def _run(self, inputs, kwargs):
        dtype = None if self.mixed_precision is None else self.mixed_precision.param_dtype
        if dtype is None:
            return self.module(*inputs, **kwargs)
        inputs, kwargs = _cast_forward_inputs(dtype, *inputs, **kwargs)
        # Gradients flow back through the cast into the parameters themselves, in their own type.
        rounded = {
            name: parameter.to(dtype)
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore and parameter.is_floating_point()
        }
        return torch.func.functional_call(self.module, rounded, inputs, kwargs)

    def _after(self, output):
        if isinstance(output, Tensor):
            return self._replica.after_forward([output])[0]
        if not torch.is_grad_enabled() or not self._replica.require_backward_grad_sync:
            self._replica.after_forward([])
            return output
        tensors: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        _map_tensors(output, collect)
        replaced = self._replica.after_forward(tensors)
        if all(new is old for new, old in zip(replaced, tensors, strict=True)):
            return output
        remaining = iter(replaced)
        return _map_tensors(output, lambda _: next(remaining))

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

    # ---- hooks ----

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Reduce buckets with `hook(state, bucket)`, which returns a future of the reduced buffer.

        Once, before the first backward, the same on all ranks. Hooks of
        `tessera.distributed.algorithms.ddp_comm_hooks` run in C++.
        """
        self._check_comm_hook(hook)
        self._replica.register_comm_hook(native_hook(state, hook))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type) -> None:
        name = str(comm_hook_type).rsplit(".", 1)[-1]
        hooks = {"ALLREDUCE": _C.all_reduce_hook, "FP16_COMPRESS": lambda: _C.compress_hook(torch.float16)}
        self._replica.register_comm_hook(hooks[name]())

    def _register_fused_optim(self, optim: type, *args, optim_params=None, **kwargs) -> None:
        """Step parameters as their buckets arrive. `optim` is SGD, Adam or AdamW of torch.optim."""
        makers = {
            torch.optim.SGD: _C.sgd_in_backward,
            torch.optim.Adam: _C.adam_in_backward,
            torch.optim.AdamW: _C.adamw_in_backward,
        }
        if optim not in makers:
            raise ValueError(f"{optim.__name__} cannot run in backward; SGD, Adam and AdamW can.")
        only = None
        if optim_params is not None:
            wanted = {id(parameter) for parameter in optim_params}
            only = {name for name, parameter, _ in _parameters_of(self.module) if id(parameter) in wanted}
        hook = _C.hook_then_optimizer(_C.all_reduce_hook(), makers[optim](*args, **kwargs), only)
        self._replica.register_comm_hook(hook)

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable, comm_hook_location=_BufferCommHookLocation.POST_FORWARD
    ) -> None:
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")

        def run(buffers):
            future = hook(state, buffers)
            if future is None:
                return []
            return list(future) if isinstance(future, (list, tuple)) else [future]

        self._replica.register_buffer_hook(run, comm_hook_location == _BufferCommHookLocation.PRE_FORWARD)

    def _check_comm_hook(self, hook: Callable) -> None:
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        try:
            signature = inspect.signature(hook)
        except ValueError:
            return
        bucket = signature.parameters.get("bucket")
        allowed = (inspect.Parameter.empty, dist.GradBucket, _C.GradBucket, Any)
        if bucket is not None and bucket.annotation not in allowed and not isinstance(bucket.annotation, str):
            raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
        returned = signature.return_annotation
        allowed = (
            inspect.Signature.empty,
            torch.futures.Future,
            torch.futures.Future[torch.Tensor],
        )
        if returned not in allowed and not isinstance(returned, str):
            raise ValueError(
                "Communication hook: return annotation should be torch.futures.Future or torch._C.Future."
            )

    # ---- what training scripts set and ask ----

    @property
    def require_backward_grad_sync(self) -> bool:
        return self._replica.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._replica.require_backward_grad_sync = value

    @property
    def find_unused_parameters(self) -> bool:
        return self._replica.options()["find_unused_parameters"]

    @property
    def static_graph(self) -> bool:
        return self._replica.options()["static_graph"]

    @property
    def forward_sync_buffers(self) -> bool:
        forward, broadcast = (self._settings[n] for n in ("forward_sync_buffers", "broadcast_buffers"))
        return forward if forward is not None else broadcast is not False

    broadcast_buffers = forward_sync_buffers

    def will_sync_module_buffers(self) -> bool:
        """Say whether a training forward sends rank 0's buffers first."""
        return self.forward_sync_buffers and any(
            name not in self.parameters_to_ignore for name, _ in self.module.named_buffers()
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
        self._replica.set_static_graph()
        self._settings["static_graph"] = True

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        return self._replica.logging_data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
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
    def _set_params_and_buffers_to_ignore_for_model(module: Module, names: Sequence[str]) -> None:
        module._ddp_params_and_buffers_to_ignore = names
        for name, parameter in module.named_parameters():
            if name in names:
                parameter._ddp_ignored = True
        for name, buffer in module.named_buffers():
            if name in names:
                buffer._ddp_ignored = True

    @staticmethod
    def _get_data_parallel_params(module: Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the parameters that are not ignored, with their names if asked."""
        for name, parameter in module.named_parameters():
            if not getattr(parameter, "_ddp_ignored", False):
                yield (name, parameter) if named_params else parameter

    @classmethod
    def _get_active_ddp_module(cls) -> DistributedDataParallel | None:
        return cls._active_ddp_module

    def train(self, mode: bool = True):
        super().train(mode)
        return self

    def __getstate__(self):
        if self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process "
                "group. That is, when you have called init_process_group and have not passed "
                "process_group argument to DDP constructor"
            )
        left_out = ("process_group", "_replica", "_join_config", "_comm_hooks")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state):
        super().__setstate__(state)
        Joinable.__init__(self)
        self.process_group = _group_of(None, None, self.module)
        self._settings = {**self._settings, "init_sync": False}
        self._start()
        self._set_mixed_precision()
        self._used_gradients = ()
        self._set_optimizers_in_backward()


@functools.cache
def _has_slices() -> bool:
    return hasattr(dist.device_mesh.DeviceMesh, "_get_root_mesh")


def _group_of(process_group, device_mesh, module: Module) -> dist.ProcessGroup:
    if process_group and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is None:
        if process_group is not None:
            return process_group
        return dist.distributed_c10d._get_default_group()
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if _has_slices() and device_mesh._get_root_mesh() != device_mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return device_mesh.get_group(mesh_dim=0)


def _device_names(devices) -> list[str]:
    return [
        str(torch.device("cuda", device)) if isinstance(device, int) else str(torch.device(device))
        for device in devices or ()
    ]


def _warn_of_broadcast_buffers(is_ignored: bool) -> None:
    if is_ignored:
        text = (
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` "
            "is deprecated and its value is ignored when `forward_sync_buffers` is provided."
        )
    else:
        text = (
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; unlike "
            "`broadcast_buffers=False`, `forward_sync_buffers=False` still sends buffers once at "
            "construction."
        )
    warnings.warn(text, FutureWarning, stacklevel=3)
