"""FusedEmbeddingBagCollection over ranks: its tables keep the rule they were made with.

>>> FusedEmbeddingBagCollectionSharder().module_type.__name__
'FusedEmbeddingBagCollection'
"""

from __future__ import annotations

from tessera.distributed._sharded_tables import CollectionSharder
from tessera.distributed.embeddingbag import ShardedEmbeddingBagCollection
from tessera.modules.fused_embedding_modules import FusedEmbeddingBagCollection

__all__ = ["FusedEmbeddingBagCollectionSharder", "ShardedFusedEmbeddingBagCollection"]


class ShardedFusedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """Pool rows that lie on several ranks; backward steps them there."""

    _MODULE = FusedEmbeddingBagCollection


class FusedEmbeddingBagCollectionSharder(CollectionSharder[FusedEmbeddingBagCollection]):
    """Shard FusedEmbeddingBagCollection."""

    _SHARDED = ShardedFusedEmbeddingBagCollection
