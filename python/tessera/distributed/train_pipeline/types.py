"""Where arguments are found in a batch."""

from tessera.distributed._pipelined_modules import ArgInfo

__all__ = ["ArgInfo"]
