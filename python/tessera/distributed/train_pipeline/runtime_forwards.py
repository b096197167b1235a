"""Forwards that compute with ids sent ahead."""

from tessera.distributed._pipelined_modules import (
    BaseForward,
    KJTAllToAllForward,
    PipelinedForward,
    PrefetchPipelinedForward,
)

__all__ = ["BaseForward", "KJTAllToAllForward", "PipelinedForward", "PrefetchPipelinedForward"]
