"""Whole tables on every rank: nothing travels."""

from __future__ import annotations

from tessera.distributed.embedding_sharding import C, EmbeddingShardingContext
from tessera.distributed.sharding._parts import (
    Cut,
    DpPooledEmbeddingDist,
    DpSparseFeaturesDist,
    PartsSharding,
)

__all__ = [
    "BaseDpEmbeddingSharding",
    "DpPooledEmbeddingDist",
    "DpPooledEmbeddingSharding",
    "DpSparseFeaturesDist",
]


class BaseDpEmbeddingSharding(PartsSharding[C]):
    """Look up on the rank that has the samples; DistributedDataParallel averages the gradients."""

    _cut = Cut.COPIES


class DpPooledEmbeddingSharding(BaseDpEmbeddingSharding[EmbeddingShardingContext]):
    """Pool whole tables."""
