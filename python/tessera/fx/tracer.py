"""Tracing of models that hold sharded modules, which are called as a whole.

>>> from torch import nn
>>> symbolic_trace(nn.Sequential(nn.ReLU()))(torch.tensor([-1.0, 1.0])).tolist()
[0.0, 1.0]
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx import Tracer as TorchTracer

__all__ = ["Tracer", "is_fx_tracing", "symbolic_trace"]

_depth = {"now": 0}


def is_fx_tracing() -> bool:
    """Tell whether a Tracer of this module is at work."""
    return _depth["now"] > 0


class Tracer(TorchTracer):
    """Look into modules, but not into sharded ones, collections of tables and those in `leaf_modules`.

    A name in `leaf_modules` is that of a class or the path of a module.
    """

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = leaf_modules or []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether a module is called as a whole."""
        from tessera.distributed.types import ShardedModule
        from tessera.modules.embedding_modules import (
            EmbeddingBagCollectionInterface,
            EmbeddingCollectionInterface,
        )

        if isinstance(m, (ShardedModule, EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)):
            return True
        names = {type(m).__name__, module_qualified_name}
        return not names.isdisjoint(self._leaf_modules) or super().is_leaf_module(m, module_qualified_name)

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> Graph:
        """Return the graph of a model."""
        _depth["now"] += 1
        try:
            graph = super().trace(root, concrete_args)
        finally:
            _depth["now"] -= 1
        _name_types(graph, root)
        return graph


def _name_types(graph: Graph, root: nn.Module | Callable[..., Any]) -> None:
    """Put types in the place of their names, which a module with postponed annotations has.

    torch.jit.script could not find them by name in the code of the graph.
    """
    named = [node for node in graph.nodes if isinstance(node.type, str)]
    if not named:
        return
    function = root.forward if isinstance(root, nn.Module) else root
    try:
        types = typing.get_type_hints(function)
    except (NameError, TypeError):
        types = {}
    for node in named:
        node.type = types.get("return" if node.op == "output" else node.target)


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: list[str] | None = None,
) -> GraphModule:
    """Return a model as a graph that can be changed."""
    tracer = Tracer(leaf_modules)
    graph = tracer.trace(root, concrete_args)
    return GraphModule(root if isinstance(root, nn.Module) else torch.nn.Module(), graph)
