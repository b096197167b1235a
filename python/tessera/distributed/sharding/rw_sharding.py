"""Rows of tables over all ranks."""

from __future__ import annotations

from tessera.distributed.embedding_sharding import C, EmbeddingShardingContext
from tessera.distributed.sharding._parts import (
    Cut,
    PartsSharding,
    RwPooledEmbeddingDist,
    RwSparseFeaturesDist,
)

__all__ = [
    "BaseRwEmbeddingSharding",
    "RwPooledEmbeddingDist",
    "RwPooledEmbeddingSharding",
    "RwSparseFeaturesDist",
]


class BaseRwEmbeddingSharding(PartsSharding[C]):
    """Send ids to the rows, on whichever rank they lie; all ranks have the same features."""

    _cut = Cut.ROWS


class RwPooledEmbeddingSharding(BaseRwEmbeddingSharding[EmbeddingShardingContext]):
    """Sum the rows of a bag over the ranks; see `mean_factors` for means."""
