"""What one batch has in flight."""

from tessera.distributed._pipelined_modules import (
    EmbeddingTrainPipelineContext,
    PrefetchTrainPipelineContext,
    TrainPipelineContext,
)

__all__ = ["EmbeddingTrainPipelineContext", "PrefetchTrainPipelineContext", "TrainPipelineContext"]
