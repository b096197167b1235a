"""Training loops that send ids ahead, and what they are made of; see `train_pipelines`."""

from functools import partial

from tessera._lazy import submodule
from tessera.distributed.train_pipeline._loading import DataLoadingThread  # noqa: F401
from tessera.distributed.train_pipeline.gradient_accumulation import (  # noqa: F401
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from tessera.distributed.train_pipeline.train_pipelines import *  # noqa: F403
from tessera.distributed.train_pipeline.train_pipelines import __all__  # noqa: F401

__getattr__ = partial(submodule, __name__)
