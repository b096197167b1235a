"""How the inputs of sharded modules are found."""

from tessera.distributed._pipelined_modules import Tracer

__all__ = ["Tracer"]
