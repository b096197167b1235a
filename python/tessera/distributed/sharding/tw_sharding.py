"""Whole tables on ranks."""

from __future__ import annotations

from tessera.distributed.embedding_sharding import C, EmbeddingShardingContext
from tessera.distributed.sharding._parts import PartsSharding, TwPooledEmbeddingDist, TwSparseFeaturesDist

__all__ = [
    "BaseTwEmbeddingSharding",
    "TwPooledEmbeddingDist",
    "TwPooledEmbeddingSharding",
    "TwSparseFeaturesDist",
]


class BaseTwEmbeddingSharding(PartsSharding[C]):
    """Send every feature to the one rank of its table."""


class TwPooledEmbeddingSharding(BaseTwEmbeddingSharding[EmbeddingShardingContext]):
    """Pool whole tables on their ranks."""
