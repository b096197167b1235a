"""Forwards that compute with ids sent ahead."""

from tessera.distributed._pipelined_modules import (
    BaseForward,
    EmbeddingPipelinedForward,
    KJTAllToAllForward,
    PipelinedForward,
    PrefetchPipelinedForward,
)

__all__ = [
    "BaseForward",
    "EmbeddingPipelinedForward",
    "KJTAllToAllForward",
    "PipelinedForward",
    "PrefetchPipelinedForward",
]
