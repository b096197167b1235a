"""What pipelines are made of, by torchrec's older path."""

from tessera.distributed._pipelined_modules import (
    ArgInfo,
    BaseForward,
    KJTAllToAllForward,
    PipelinedForward,
    PrefetchPipelinedForward,
    PrefetchTrainPipelineContext,
    Tracer,
    TrainPipelineContext,
)

__all__ = [
    "ArgInfo",
    "BaseForward",
    "KJTAllToAllForward",
    "PipelinedForward",
    "PrefetchPipelinedForward",
    "PrefetchTrainPipelineContext",
    "Tracer",
    "TrainPipelineContext",
]
