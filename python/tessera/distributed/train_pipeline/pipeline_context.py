"""What one batch has in flight."""

from tessera.distributed._pipelined_modules import PrefetchTrainPipelineContext, TrainPipelineContext

__all__ = ["PrefetchTrainPipelineContext", "TrainPipelineContext"]
