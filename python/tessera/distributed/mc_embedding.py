"""Rows of any ids in tables that lie over the ranks of a group.

    sharder = ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder(fused_params))
    plan = construct_module_sharding_plan(module, {"users": row_wise()}, sharder)
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD))
    rows, remapped = sharded(features)  # this rank's own samples; all ranks call it

>>> ManagedCollisionEmbeddingCollectionSharder().sharding_types("cpu")
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
from tessera.distributed.embedding import (
    EmbeddingCollectionAwaitable,
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
)
from tessera.distributed.mc_modules import ManagedCollisionCollectionSharder
from tessera.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv
from tessera.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection

__all__ = [
    "ManagedCollisionEmbeddingCollectionContext",
    "ManagedCollisionEmbeddingCollectionSharder",
    "ShardedManagedCollisionEmbeddingCollection",
]


@dataclass
class ManagedCollisionEmbeddingCollectionContext(MappedIds, EmbeddingCollectionContext):
    """Carry one batch: that of the tables, and what became of the ids."""


class ShardedManagedCollisionEmbeddingCollection(ShardedManagedCollisionTables):
    """Map ids, then look up rows of tables that lie over the ranks as a plan says.

    Ids go to their owners, who map them, admit and evict; rows that got another id are reset, with the
    state of a fused optimizer, before the lookup of the same call. Forward returns rows to come, and
    the mapped features to come, or None. All ranks call it.
    """

    _CONTEXT = ManagedCollisionEmbeddingCollectionContext
    _MAPPED = ManagedCollisionEmbeddingCollection
    _PENDING = EmbeddingCollectionAwaitable

    def __init__(
        self,
        module: ManagedCollisionEmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        ec_sharder: EmbeddingCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, ec_sharder, mc_sharder, env, device)


class ManagedCollisionEmbeddingCollectionSharder(ManagedCollisionTablesSharder):
    """Shard ManagedCollisionEmbeddingCollection; `ec_sharder` says how its tables are stepped."""

    _SHARDED = ShardedManagedCollisionEmbeddingCollection

    def __init__(
        self,
        ec_sharder: EmbeddingCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        inner = ec_sharder or EmbeddingCollectionSharder(fused_params, qcomm_codecs_registry)
        super().__init__(inner, mc_sharder, fused_params, qcomm_codecs_registry)
