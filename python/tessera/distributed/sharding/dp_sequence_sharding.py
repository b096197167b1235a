"""Rows of single ids of whole tables on every rank."""

from __future__ import annotations

from tessera.distributed.sharding._parts import DpSequenceEmbeddingDist
from tessera.distributed.sharding.dp_sharding import BaseDpEmbeddingSharding
from tessera.distributed.sharding.sequence_sharding import SequenceShardingContext

__all__ = ["DpSequenceEmbeddingDist", "DpSequenceEmbeddingSharding"]


class DpSequenceEmbeddingSharding(BaseDpEmbeddingSharding[SequenceShardingContext]):
    """Look up rows on the rank that has the ids."""

    _is_sequence = True
