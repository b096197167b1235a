"""Functions of the reference that are autograd functions, over an engine that has its own graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


def run(ctx: Any, logits: Tensor, inference_only: bool, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Run `compute` on a leaf that shares the logits' memory, and keep its graph for backward."""
    ctx.result = None
    if inference_only or torch.is_inference_mode_enabled():
        with torch.no_grad():
            value = compute(logits)
        if inference_only:
            ctx.mark_non_differentiable(value)
        return value
    leaf = logits.detach().requires_grad_(True)
    with torch.enable_grad():
        ctx.result = compute(leaf)
    ctx.leaf = leaf
    return ctx.result.detach()


def gradient(ctx: Any, grad_output: Tensor) -> Tensor:
    """Return the gradient of the logits. `create_graph` is passed on, for the engine to refuse."""
    if ctx.result is None:
        raise ValueError("vocab: this was computed with inference_only=True and has no gradient.")
    # A context that is not autograd's own: somebody calls backward by hand.
    create_graph = torch.is_grad_enabled() and isinstance(ctx, BackwardCFunction)
    (of_logits,) = torch.autograd.grad(
        ctx.result, ctx.leaf, grad_output, retain_graph=True, create_graph=create_graph
    )
    return of_logits
