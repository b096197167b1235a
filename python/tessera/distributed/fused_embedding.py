"""FusedEmbeddingCollection over ranks: its tables keep the rule they were made with.

>>> FusedEmbeddingCollectionSharder().module_type.__name__
'FusedEmbeddingCollection'
"""

from __future__ import annotations

from tessera.distributed._sharded_tables import CollectionSharder
from tessera.distributed.embedding import ShardedEmbeddingCollection
from tessera.modules.fused_embedding_modules import FusedEmbeddingCollection

__all__ = ["FusedEmbeddingCollectionSharder", "ShardedFusedEmbeddingCollection"]


class ShardedFusedEmbeddingCollection(ShardedEmbeddingCollection):
    """Look up rows that lie on several ranks; backward steps them there."""

    _MODULE = FusedEmbeddingCollection


class FusedEmbeddingCollectionSharder(CollectionSharder[FusedEmbeddingCollection]):
    """Shard FusedEmbeddingCollection."""

    _SHARDED = ShardedFusedEmbeddingCollection
