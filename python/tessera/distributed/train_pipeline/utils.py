"""What pipelines are made of, by torchrec's older path."""

from tessera.distributed import _pipelined_modules
from tessera.distributed._pipelined_modules import *  # noqa: F403
from tessera.distributed.train_pipeline._loading import DataLoadingThread

__all__ = [*_pipelined_modules.__all__, "DataLoadingThread"]
