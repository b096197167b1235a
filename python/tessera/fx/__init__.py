"""Tracing of models that hold sharded modules."""

from functools import partial

from tessera._lazy import submodule
from tessera.fx.tracer import Tracer, symbolic_trace

__all__ = ["Tracer", "symbolic_trace"]

__getattr__ = partial(submodule, __name__)
