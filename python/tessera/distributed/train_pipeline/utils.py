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
from tessera.distributed.train_pipeline._loading import DataLoadingThread

__all__ = [
    "ArgInfo",
    "BaseForward",
    "DataLoadingThread",
    "KJTAllToAllForward",
    "PipelinedForward",
    "PrefetchPipelinedForward",
    "PrefetchTrainPipelineContext",
    "Tracer",
    "TrainPipelineContext",
]
