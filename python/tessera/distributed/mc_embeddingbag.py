"""Pooled lookups of any ids in tables that lie over the ranks of a group.

    sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params))
    plan = construct_module_sharding_plan(module, {"users": row_wise()}, sharder)
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD))
    pooled, remapped = sharded(features)  # this rank's own samples; all ranks call it

>>> ManagedCollisionEmbeddingBagCollectionSharder().sharding_types("cpu")
['table_wise', 'column_wise', 'table_column_wise', 'row_wise', 'table_row_wise', 'grid_shard']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tessera.distributed._mc_embedding import (
    ManagedCollisionTablesSharder,
    MappedIds,
    ShardedManagedCollisionTables,
)
from tessera.distributed._pooled_rows import EmbeddingBagCollectionAwaitable
from tessera.distributed.embeddingbag import EmbeddingBagCollectionContext, EmbeddingBagCollectionSharder
from tessera.distributed.mc_modules import ManagedCollisionCollectionSharder
from tessera.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv
from tessera.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

__all__ = [
    "ManagedCollisionEmbeddingBagCollectionContext",
    "ManagedCollisionEmbeddingBagCollectionSharder",
    "ShardedManagedCollisionEmbeddingBagCollection",
]


@dataclass
class ManagedCollisionEmbeddingBagCollectionContext(MappedIds, EmbeddingBagCollectionContext):
    """Carry one batch: that of the tables, and what became of the ids."""


class ShardedManagedCollisionEmbeddingBagCollection(ShardedManagedCollisionTables):
    """Map ids, then pool rows of tables that lie over the ranks as a plan says.

    Ids go to their owners, who map them, admit and evict; rows that got another id are reset, with the
    state of a fused optimizer, before the lookup of the same call. Forward returns pooled to come, and
    the mapped features to come, or None. All ranks call it.
    """

    _CONTEXT = ManagedCollisionEmbeddingBagCollectionContext
    _MAPPED = ManagedCollisionEmbeddingBagCollection
    _PENDING = EmbeddingBagCollectionAwaitable

    def __init__(
        self,
        module: ManagedCollisionEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        ebc_sharder: EmbeddingBagCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, ebc_sharder, mc_sharder, env, device)


class ManagedCollisionEmbeddingBagCollectionSharder(ManagedCollisionTablesSharder):
    """Shard ManagedCollisionEmbeddingBagCollection; `ebc_sharder` says how its tables are stepped."""

    _SHARDED = ShardedManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        inner = ebc_sharder or EmbeddingBagCollectionSharder(fused_params, qcomm_codecs_registry)
        super().__init__(inner, mc_sharder, fused_params, qcomm_codecs_registry)
