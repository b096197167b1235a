"""Tensors in whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree


def map_tensors(value: Any, visit: Callable[[Tensor], Tensor]) -> Any:
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
                new = map_tensors(leaf[key], visit)
                if new is not leaf[key]:
                    leaf[key] = new
        elif isinstance(leaf, tuple):
            leaves[i] = tuple.__new__(type(leaf), [map_tensors(element, visit) for element in leaf])
            if hasattr(leaf, "__dict__"):
                vars(leaves[i]).update(vars(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                object.__setattr__(leaf, field.name, map_tensors(getattr(leaf, field.name), visit))
    return _pytree.tree_unflatten(leaves, spec)
