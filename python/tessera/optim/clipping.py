"""Gradients that are clipped before each step.

>>> import torch
>>> from tessera.optim.keyed import KeyedOptimizerWrapper
>>> weight = torch.nn.Parameter(torch.zeros(2))
>>> inner = KeyedOptimizerWrapper({"weight": weight}, lambda params: torch.optim.SGD(params, lr=1.0))
>>> optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=5.0)
>>> weight.grad = torch.tensor([6.0, 8.0])
>>> optimizer.step()
>>> [round(value, 4) for value in weight.tolist()]
[-3.0, -4.0]
"""

from __future__ import annotations

from enum import Enum, unique
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tessera import comm
from tessera.optim.keyed import KeyedOptimizer, OptimizerWrapper

__all__ = ["GradientClipping", "GradientClippingOptimizer"]


@unique
class GradientClipping(Enum):
    """Say what is clipped: the norm of all gradients together, every element, or nothing."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clip the gradients of all parameters, then step the optimizer inside.

    With `enable_global_grad_clip` the norm is that of the whole model: parameters of which a rank has only a
    part count with the parts of all ranks. Those are the parts of sharded tables, and what `param_to_pgs`
    names, with the groups their parts lie over; `step` is collective then. Otherwise each rank clips by the
    norm of what it has. `track_grad_norm` keeps the norm in `last_total_grad_norm`.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: dict[torch.nn.Parameter, list[dist.ProcessGroup]] | None = None,
        track_grad_norm: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self._clipping = clipping
        self._max_gradient = max_gradient
        self._norm_type = float(norm_type)
        self._is_global = enable_global_grad_clip
        self._groups_of = param_to_pgs or {}
        self._tracks = track_grad_norm
        self._last_norm: torch.Tensor | None = None

    @property
    def last_total_grad_norm(self) -> torch.Tensor | None:
        """Return the norm before the last step clipped it; None unless it is tracked."""
        return self._last_norm

    def step(self, closure: Any = None) -> Any:
        """Clip, then step. Collective with `enable_global_grad_clip`."""
        if self._clipping == GradientClipping.NORM:
            self.clip_grad_norm_()
        elif self._clipping == GradientClipping.VALUE:
            self._note_norm()
            torch.nn.utils.clip_grad_value_(self._parameters(), self._max_gradient)
        else:
            self._note_norm()
        return super().step(closure)

    def _note_norm(self) -> None:
        if self._tracks:
            self._last_norm, _ = self.compute_total_grad_norm()

    def _parameters(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _pgs(self, param: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups over which the parts of a parameter lie; none if it is whole."""
        if not self._is_global:
            return ()
        own = self._groups_of.get(param)
        if own is None and isinstance(param, DTensor):
            own = [
                param.device_mesh.get_group(axis) for axis, p in enumerate(param.placements) if p.is_shard()
            ]
        if own is None and getattr(param, "_is_table_part", False):
            own = [param._table_group]
        return tuple(own or ())

    def compute_total_grad_norm(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the norm of all gradients, and the gradients. Collective with `enable_global_grad_clip`."""
        parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {(): []}
        for param in self._parameters():
            grads = parts.setdefault(self._pgs(param), [])
            if param.grad is None:
                continue
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            if grad.is_sparse:
                param.grad = grad = grad.coalesce()
                grad = grad._values()
            grads.append(grad)
        is_max = self._norm_type == float("inf")
        everything = [grad for grads in parts.values() for grad in grads]
        device = everything[0].device if everything else torch.device("cpu")
        total = torch.zeros((), device=device)
        kind = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        for groups, grads in parts.items():
            norm = (
                torch.nn.utils.get_total_norm(grads, self._norm_type).to(device)
                if grads
                else total.new_zeros(())
            )
            share = norm if is_max else norm.pow(self._norm_type)
            for group in groups:
                share = comm.all_reduce(share.reshape(1), group, kind).reshape(())
            total = torch.maximum(total, share) if is_max else total + share
        return total if is_max else total.pow(1.0 / self._norm_type), everything

    def clip_grad_norm_(self) -> torch.Tensor:
        """Scale all gradients to the greatest norm allowed, if theirs is greater; return what it was."""
        norm, grads = self.compute_total_grad_norm()
        factor = torch.clamp(self._max_gradient / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.detach().mul_(factor.to(grad.device))
        if self._tracks:
            self._last_norm = norm
        return norm
