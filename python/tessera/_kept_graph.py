"""Functions of the reference that are autograd functions, over an engine that has its own graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class EngineFunction(torch.autograd.Function):
    """An autograd function whose `apply` is the engine's own.

    The engine's node saves its tensors as torch's do: they are freed by backward, and packed by hooks
    such as those of checkpointing. `forward` and `backward` are for those who call them by hand.
    """

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Return what `forward` returns, differentiably."""
        return cls.forward(None, *args, **kwargs)


def run(ctx: Any, logits: Tensor, inference_only: bool, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Run `compute`; for a context, on a leaf that shares the logits' memory, with its graph kept there."""
    if ctx is None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return compute(logits)
    if inference_only or torch.is_inference_mode_enabled():
        ctx.result = None
        with torch.no_grad():
            return compute(logits)
    leaf = logits.detach().requires_grad_(True)
    with torch.enable_grad():
        ctx.result = compute(leaf)
    ctx.leaf = leaf
    return ctx.result.detach()


def gradient(ctx: Any, grad_output: Tensor) -> Tensor:
    """Return the gradient of the logits, once."""
    if ctx.result is None:
        raise ValueError("vocab: this was computed with inference_only=True and has no gradient.")
    (of_logits,) = torch.autograd.grad(ctx.result, ctx.leaf, grad_output)
    return of_logits
