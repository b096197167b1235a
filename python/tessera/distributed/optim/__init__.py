"""Optimizers that know of other ranks."""

from tessera.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

__all__ = ["PostLocalSGDOptimizer"]
