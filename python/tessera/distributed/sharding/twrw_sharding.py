"""Rows of tables over the ranks of one host."""

from __future__ import annotations

from tessera.distributed.embedding_sharding import C, EmbeddingShardingContext
from tessera.distributed.sharding._parts import (
    Cut,
    PartsSharding,
    TwRwPooledEmbeddingDist,
    TwRwSparseFeaturesDist,
)

__all__ = [
    "BaseTwRwEmbeddingSharding",
    "TwRwPooledEmbeddingDist",
    "TwRwPooledEmbeddingSharding",
    "TwRwSparseFeaturesDist",
]


class BaseTwRwEmbeddingSharding(PartsSharding[C]):
    """Send ids to the host of their table, there to the rank of the row."""

    _cut = Cut.ROWS
    _in_hosts = True


class TwRwPooledEmbeddingSharding(BaseTwRwEmbeddingSharding[EmbeddingShardingContext]):
    """Sum the rows of a bag over the ranks of a host; see `mean_factors` for means."""
