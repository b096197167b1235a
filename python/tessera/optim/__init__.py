"""Optimizers of embedding tables: they step the rows that have a gradient, and no others.

    weights = dict(bags.named_parameters())
    optimizer = tessera.optim.RowWiseAdagrad(weights, lr=0.02)
    loss.backward()
    optimizer.clip_grad_norm(1.0)
    optimizer.step()

They are torch optimizers, take sparse gradients (rows that occur several times are summed first) and dense
ones (every row steps). The rules, with their numbers, are those of tessera/embedding/optimizer.h. A
collection whose backward steps its rows at once needs none of them.
"""

from functools import partial

from tessera._lazy import submodule
from tessera.optim._optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    TableOptimizer,
)
from tessera.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tessera.optim.clipping import GradientClipping, GradientClippingOptimizer
from tessera.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from tessera.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from tessera.optim.semi_sync import SemisyncOptimizer
from tessera.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CombinedOptimizer",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
    "SemisyncOptimizer",
    "TableOptimizer",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
]

__getattr__ = partial(submodule, __name__)
