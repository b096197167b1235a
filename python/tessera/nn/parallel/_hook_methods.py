"""How DistributedDataParallel is told what to do with gradients and buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map
from torch.nn.parallel.distributed import _BufferCommHookLocation

from tessera import _C
from tessera.distributed.algorithms.ddp_comm_hooks._native import native_hook
from tessera.nn.parallel._arguments import parameters_of


class HookMethods:
    """Communication hooks, buffer hooks, and optimizers that run in backward."""

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Reduce buckets with `hook(state, bucket)`, which returns a future of the reduced buffer.

        Once, before the first backward, the same on all ranks. Hooks of
        `tessera.distributed.algorithms.ddp_comm_hooks` run in C++.
        """
        self._check_comm_hook(hook)
        self._replica.register_comm_hook(native_hook(state, hook))
        self._comm_hooks.append((hook, state))
        self._logged["comm_hook"] = getattr(hook, "__qualname__", type(hook).__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type) -> None:
        name = str(comm_hook_type).rsplit(".", 1)[-1]
        hooks = {"ALLREDUCE": _C.all_reduce_hook, "FP16_COMPRESS": lambda: _C.compress_hook(torch.float16)}
        self._replica.register_comm_hook(hooks[name]())
        self._logged["comm_hook"] = str(comm_hook_type)

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
            only = {name for name, parameter, _ in parameters_of(self.module) if id(parameter) in wanted}
        hook = _C.hook_then_optimizer(_C.all_reduce_hook(), makers[optim](*args, **kwargs), only)
        self._replica.register_comm_hook(hook)

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable, comm_hook_location=_BufferCommHookLocation.POST_FORWARD
    ) -> None:
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")

        def run(buffers):
            future = hook(state, buffers)
            if future is None:
                return []
            return list(future) if isinstance(future, (list, tuple)) else [future]

        self._replica.register_buffer_hook(run, comm_hook_location == _BufferCommHookLocation.PRE_FORWARD)

    def _check_comm_hook(self, hook: Callable) -> None:
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
        try:
            signature = inspect.signature(hook)
        except ValueError:
            return
        bucket = signature.parameters.get("bucket")
        allowed = (inspect.Parameter.empty, dist.GradBucket, _C.GradBucket, Any)
        if bucket is not None and bucket.annotation not in allowed and not isinstance(bucket.annotation, str):
            self._log_and_throw(
                ValueError, "Communication hook: bucket annotation should be dist.GradBucket."
            )
        returned = signature.return_annotation
        allowed = (
            inspect.Signature.empty,
            torch.futures.Future,
            torch.futures.Future[torch.Tensor],
        )
        if returned not in allowed and not isinstance(returned, str):
            self._log_and_throw(
                ValueError,
                "Communication hook: return annotation should be torch.futures.Future or torch._C.Future.",
            )

    def _set_optimizers_in_backward(self):
        """Take over the optimizers that `_apply_optimizer_in_backward` gave to parameters.

        Called before each forward of a process that uses such optimizers: they may have come after the
        wrapper.
        """
        num_optimizers = sum(
            len(getattr(parameter, "_in_backward_optimizers", ())) for parameter in self._module_parameters
        )
        if num_optimizers == self._num_taken_optimizers:
            return
        stepped = {
            name: parameter
            for name, parameter, _ in parameters_of(self.module)
            if name not in self._ignored and hasattr(parameter, "_in_backward_optimizers")
        }
        if self._stepped_in_backward is None:
            self._register_optimizers_in_backward(stepped)
        else:
            self._stepped_in_backward.update(stepped)
        # They would step by this rank's own gradient; from now on they get the average.
        for parameter in stepped.values():
            for handle in param_to_optim_hook_handle_map.pop(parameter, ()):
                handle.remove()
        self._num_taken_optimizers = num_optimizers

    def _register_optimizers_in_backward(self, stepped: dict[str, Tensor]) -> None:
        reduced = sum(p.requires_grad for p in self._module_parameters)
        is_all = len(stepped) == reduced

        def step(names: list[str], gradients: list[Tensor]) -> None:
            for name, gradient in zip(names, gradients, strict=True):
                parameter = stepped.get(name)
                if parameter is None:
                    continue
                parameter.grad = gradient
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None
            self._used_gradients = () if is_all else tuple(stepped.values())

        hook = _C.hook_then_optimizer(
            _C.all_reduce_hook(), _C.python_in_backward(step), None if is_all else set(stepped)
        )
        try:
            self._replica.register_comm_hook(hook)
        except RuntimeError as error:
            raise RuntimeError(
                f"DistributedDataParallel: '{next(iter(stepped))}' was given an optimizer by "
                "_apply_optimizer_in_backward, which would step by this rank's own gradient. It cannot be "
                f"taken over any more: {str(error).splitlines()[0]} Give parameters their optimizers before "
                "the model is wrapped, or at least before its first backward, and register no other hook."
            ) from error
        self._stepped_in_backward = stepped
