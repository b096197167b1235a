"""Optimizers that run in backward.

>>> import torch
>>> weight = torch.nn.Parameter(torch.ones(2))
>>> apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
>>> weight.sum().backward()
>>> weight.tolist(), weight.grad
([0.5, 0.5], None)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.optim import _apply_optimizer_in_backward

__all__ = ["apply_optimizer_in_backward"]


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[torch.nn.Parameter],
    optimizer_kwargs: dict[str, Any],
) -> None:
    """Step each parameter as soon as its gradient is there, with an optimizer of its own.

    Sharded tables take the rule from their parameters, so this comes before the plan and the sharding.
    """
    _apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)
