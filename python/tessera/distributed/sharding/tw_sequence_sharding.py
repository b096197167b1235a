"""Rows of single ids of whole tables on ranks."""

from __future__ import annotations

from tessera.distributed.sharding.sequence_sharding import SequenceShardingContext
from tessera.distributed.sharding.tw_sharding import BaseTwEmbeddingSharding

__all__ = ["TwSequenceEmbeddingSharding"]


class TwSequenceEmbeddingSharding(BaseTwEmbeddingSharding[SequenceShardingContext]):
    """Look up rows on the rank of their table; all tables have the same number of columns."""

    _is_sequence = True
