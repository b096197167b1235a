"""Tracing of models that hold sharded modules."""

from tessera.fx.tracer import Tracer, symbolic_trace

__all__ = ["Tracer", "symbolic_trace"]
