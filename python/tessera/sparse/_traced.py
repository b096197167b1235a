"""What the classes of jagged batches share: whether torch is tracing, and calls on what it traces."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._jit_internal import FunctionModifiers
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy, ProxyableClassMeta


class BatchMeta(abc.ABCMeta, ProxyableClassMeta):
    """Make a call of the class with a Proxy of torch.fx a node of its graph; let scripts know the class."""

    @property
    def _torchscript_modifier(cls) -> FunctionModifiers:
        """Be asked by torch.jit.script before it reads a class, which is when it needs one it can read."""
        from tessera.sparse import _scripted

        _scripted.register()
        return FunctionModifiers.DEFAULT


def is_traced(tensor: Any) -> bool:
    """Return whether torch records what is done with `tensor`: then the engine cannot read it.

    So it is in torch.compile, torch.export and torch.jit.trace.
    """
    if torch.compiler.is_compiling():
        return True
    return isinstance(tensor, FakeTensor) or torch.jit.is_tracing()


def proxy_in(values: Any) -> Proxy | None:
    """Return the first Proxy of torch.fx among the items of (nested) lists, tuples and dicts."""
    if isinstance(values, Proxy):
        return values
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        for value in values:
            found = proxy_in(value)
            if found is not None:
                return found
    return None


def as_node(function: Callable, *args: Any) -> Any:
    """Return the node of this call in the graph of torch.fx to which an argument belongs."""
    proxy = proxy_in(args)
    assert proxy is not None
    return proxy.tracer.create_proxy("call_function", function, args, {})


# ---- the engine's operators, in torch's ----


def offsets_of(lengths: Tensor) -> Tensor:
    """Return where bags of these lengths begin, and where the last one ends."""
    return torch.cat([lengths.new_zeros(1), lengths.reshape(-1).cumsum(0, dtype=lengths.dtype)])


def lengths_of(offsets: Tensor) -> Tensor:
    """Return the lengths of bags that begin there."""
    return offsets[1:] - offsets[:-1]


def sizes_of(sums: Tensor) -> list[int]:
    """Return numbers of elements that are known only when the graph runs."""
    if torch.jit.is_tracing():
        raise TypeError(
            "jagged: torch.jit.trace would keep the sizes of this batch for all others. Use torch.export."
        )
    sizes = sums.tolist()
    for size in sizes:
        torch._check(size >= 0)
    return sizes


def cut(tensor: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return pieces of these sizes, which add up to all rows."""
    return torch.split(tensor, sizes)


def padded(values: Tensor, lengths: Tensor, offsets: Tensor, size: int, padding: float) -> Tensor:
    """Return [bags, size, ...]: the first values of each bag, filled up."""
    last = values.new_full((1, *values.shape[1:]), padding)
    places = torch.arange(size, device=values.device)
    is_there = places < lengths[:, None]
    rows = torch.where(is_there, offsets[:-1, None] + places, values.shape[0])
    return torch.cat([values, last])[rows]
