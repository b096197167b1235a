"""Rows of single ids of tables whose rows lie over all ranks."""

from __future__ import annotations

from tessera.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding
from tessera.distributed.sharding.sequence_sharding import SequenceShardingContext

__all__ = ["RwSequenceEmbeddingSharding"]


class RwSequenceEmbeddingSharding(BaseRwEmbeddingSharding[SequenceShardingContext]):
    """Look up rows where they lie; they come home in the order of the ids.

    The context gets `unbucketize_permute_tensor` from the input dist.
    """

    _is_sequence = True
