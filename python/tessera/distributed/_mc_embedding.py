"""What sharded tables behind managed collision have in common, pooled or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tessera import _C
from tessera.distributed._mc_growing import GROWING_TYPES, GrowingEngine, growing_modules
from tessera.distributed.embedding_types import BaseEmbeddingSharder, ShardedEmbeddingModule
from tessera.distributed.mc_modules import (
    ManagedCollisionCollectionContext,
    ManagedCollisionCollectionSharder,
)
from tessera.distributed.types import (
    Awaitable,
    CommOp,
    LazyNoWait,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from tessera.distributed.utils import append_prefix
from tessera.modules.mc_embedding_modules import reset_rows
from tessera.optim.keyed import CombinedOptimizer
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

_MODULE = "_embedding_module"


@dataclasses.dataclass
class MappedIds:
    """What became of the ids of one batch, beside the context of its tables."""

    evictions_per_table: dict[str, torch.Tensor | None] | None = None
    remapped_kjt: KeyedJaggedTensor | None = None
    ids: ManagedCollisionCollectionContext | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until `stream` has used them."""
        super().record_stream(stream)
        for part in (self.remapped_kjt, self.ids, *(self.evictions_per_table or {}).values()):
            if part is not None:
                part.record_stream(stream)


class ShardedManagedCollisionTables(ShardedEmbeddingModule):
    """Map the ids, reset rows that got another id, look up: all over ranks.

    Forward returns a pair: the rows to come, and the features with rows in place of ids to come, or None.
    """

    _CONTEXT: type
    _MAPPED: type
    _PENDING: type  # rows on their way home

    def __init__(
        self,
        module: nn.Module,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        sharder: BaseEmbeddingSharder,
        mc_sharder: ManagedCollisionCollectionSharder,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(sharder.qcomm_codecs_registry)
        ids, tables = module._managed_collision_collection, module._embedding_module
        self._return_remapped_features = module._return_remapped_features
        growing = growing_modules(module)
        self._growing = None
        if growing:
            codecs = (sharder.qcomm_codecs_registry or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
            plan, fused_params = table_name_to_parameter_sharding, sharder.fused_params
            self._growing = GrowingEngine(module, growing, plan, fused_params, codecs, env)
            self._register_state_dict_hook(ShardedManagedCollisionTables._put_growing)
            self._register_load_state_dict_pre_hook(
                ShardedManagedCollisionTables._take_growing, with_module=True
            )
            return
        self._managed_collision_collection = mc_sharder.shard(
            ids, table_name_to_parameter_sharding, env, device=device
        )
        # Mapped features of several tables have names of their own.
        configs = tables._configs
        tables._configs = [dataclasses.replace(c, feature_names=ids.features_of(c.name)) for c in configs]
        try:
            self._embedding_module = sharder.shard(tables, table_name_to_parameter_sharding, env, device)
        finally:
            tables._configs = configs

    # ---- one batch ----

    def create_context(self) -> Any:
        """Return the context of one batch."""
        return self._CONTEXT()

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[list]]:
        """Start sending the ids to their owners. Collective."""
        if self._growing is not None:
            return self._growing.input_dist(features)
        ctx.ids = ManagedCollisionCollectionContext()
        return self._managed_collision_collection.input_dist(ctx.ids, features)

    def compute(self, ctx: Any, dist_input: list) -> list:
        """Map the ids, reset the rows that changed hands, and read rows. Collective."""
        if self._growing is not None:
            return self._growing.compute(dist_input, self.training)
        ids = self._managed_collision_collection
        ctx.remapped_kjt = ids.output_dist(ctx.ids, ids.compute(ctx.ids, dist_input)).wait()
        ctx.evictions_per_table = ids.evict()
        self._reset(ctx.evictions_per_table)
        tables = self._embedding_module
        return tables.compute(ctx, tables.input_dist(ctx, ctx.remapped_kjt).wait().wait())

    def output_dist(self, ctx: Any, output: list) -> tuple:
        """Return the rows to come, and the mapped features if they were asked for."""
        if self._growing is not None:
            return self._PENDING(output, [self._growing.names]), None
        mapped = LazyNoWait(ctx.remapped_kjt) if self._return_remapped_features else None
        return self._embedding_module.output_dist(ctx, output), mapped

    @torch.no_grad()
    def _reset(self, evictions: dict[str, torch.Tensor | None]) -> None:
        tables = self._embedding_module
        configs = {config.name: config for config in tables._configs}
        for engine in tables._engines:
            for shard in engine.local_shards():
                rows = evictions.get(shard.table)
                if rows is None or rows.numel() == 0:
                    continue
                own = rows.to(shard.weight.device) - shard.place.row
                own = own[(own >= 0) & (own < shard.place.rows)]
                reset_rows(shard.weight, own, configs[shard.table].init_fn, True)
                stepping = [each for each in engine.optimizers() if each.has_table(shard.name)]
                for state in shard.state.values() if stepping else ():
                    state[own] = stepping[0].options.initial_accumulator

    # ---- tables that grow ----

    def _put_growing(self, state_dict, prefix, local_metadata) -> None:
        self._growing.put_state(state_dict, prefix)

    def _take_growing(self, state_dict, prefix, *unused) -> None:
        self._growing.take_state(state_dict, prefix)

    def growth(self) -> list[_C.collision.Growth]:
        """Return ids, admissions, refusals, evictions, hits and bytes of every growing table. Collective."""
        return [] if self._growing is None else self._growing.engine.total_growth()

    def take_removed_ids(self, table: str) -> torch.Tensor:
        """Return the ids of a growing table that lost their row on this rank, once."""
        return self._growing.take_removed_ids(table)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Step growing tables by this rate from now on."""
        self._growing.engine.set_learning_rate(learning_rate)

    # ---- what others ask ----

    def evict(self) -> dict[str, torch.Tensor | None]:
        """Return rows that got another id and were not reset yet, by table; growing tables have none."""
        if self._growing is not None:
            return {config.name: None for config in self._growing._configs}
        return self._managed_collision_collection.evict()

    def gather_tables(self) -> dict[str, torch.Tensor]:
        """Return the whole tables, on every rank. Collective; for small models."""
        return self._embedding_module.gather_tables()

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Return the optimizers of the tables whose rows are stepped here."""
        if self._growing is not None:
            return CombinedOptimizer([])
        return CombinedOptimizer([(_MODULE, self._embedding_module.fused_optimizer)])

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients of tables that accumulate them to this 2-norm over all ranks. Collective."""
        return self._embedding_module.clip_grad_norm(max_norm)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Return the names of the tables' parameters."""
        if self._growing is not None:
            return
        yield from self._embedding_module.sharded_parameter_names(append_prefix(prefix, _MODULE))

    def _replica_parameters(self) -> set[str]:
        if self._growing is not None:
            return set()
        return {append_prefix(_MODULE, name) for name in self._embedding_module._replica_parameters()}

    def _tables_for_others(self) -> list[str]:
        if self._growing is not None:
            return []
        return self._embedding_module._tables_for_others()

    @property
    def unsharded_module_type(self) -> type:
        """Return the type of the module before it was sharded."""
        return self._MAPPED


class ManagedCollisionTablesSharder(BaseEmbeddingSharder):
    """Shard tables behind managed collision: where both the tables and the ids can be cut alike."""

    _SHARDED: type[ShardedManagedCollisionTables]
    # At most: 34 of lines, and four numbers of a slot: id, row, count, last call. A row that grows has half
    # as many numbers.
    _id_bytes_per_row = 34 + 4 * 8

    def __init__(
        self,
        sharder: BaseEmbeddingSharder,
        mc_sharder: ManagedCollisionCollectionSharder | None,
        fused_params: dict[str, Any] | None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._sharder = sharder
        self._mc_sharder = mc_sharder or ManagedCollisionCollectionSharder(qcomm_codecs_registry)

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisionTables:
        """Return the collection over the ranks of `env`. Collective."""
        return self._SHARDED(module, params, self._sharder, self._mc_sharder, env, device)

    @property
    def module_type(self) -> type[nn.Module]:
        """Return the collection that is sharded."""
        return self._SHARDED._MAPPED

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the types of sharding that both know."""
        known = self._mc_sharder.sharding_types(compute_device_type)
        return [kind for kind in self._sharder.sharding_types(compute_device_type) if kind in known]

    def _types_for(self, module: nn.Module, compute_device_type: str) -> list[str]:
        known = self.sharding_types(compute_device_type)
        return [kind for kind in known if kind in GROWING_TYPES] if growing_modules(module) else known

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """Return how rows are stepped."""
        return self._sharder.fused_params

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the tables by name."""
        return self._sharder.shardable_parameters(module._embedding_module)
