"""Optimizers that know of other ranks."""

from functools import partial

from tessera._lazy import submodule
from tessera.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

__all__ = ["PostLocalSGDOptimizer"]

__getattr__ = partial(submodule, __name__)
