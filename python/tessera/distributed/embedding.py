"""Rows of single ids, of tables that lie over the ranks of a group.

    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan = construct_module_sharding_plan(ec, {"users": row_wise(), "items": table_wise(0)})
    sharded = EmbeddingCollectionSharder(use_index_dedup=True).shard(ec, plan, env)
    rows = sharded(features)  # of this rank's own ids, by name; all ranks call it

>>> sharder = EmbeddingCollectionSharder({"learning_rate": 0.1}, use_index_dedup=True)
>>> sharder.module_type.__name__, sharder.fused_params
('EmbeddingCollection', {'learning_rate': 0.1})
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tessera import _C
from tessera.distributed._sharded_tables import CollectionSharder, ShardedTables, sharding_infos
from tessera.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from tessera.distributed.sharding.sequence_sharding import SequenceShardingContext
from tessera.distributed.types import (
    Awaitable,
    CommOp,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardedModule,
    ShardingEnv,
)
from tessera.modules import _traced_rows
from tessera.modules.embedding_configs import EmbeddingConfig
from tessera.modules.embedding_modules import (
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from tessera.sparse._jagged import jts_of
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tessera.streamable import Multistreamable

__all__ = [
    "EmbeddingCollectionAwaitable",
    "EmbeddingCollectionContext",
    "EmbeddingCollectionSharder",
    "ShardedEmbeddingCollection",
    "create_embedding_sharding",
    "create_sharding_infos_by_sharding",
    "get_ec_index_dedup",
    "set_ec_index_dedup",
]

_OPERATION = "sharding.embedding_collection"
_engine = _C.sharding
_dedup = {"is_on": False}


def set_ec_index_dedup(val: bool) -> None:
    """Let all collections made from now on send each id once. Deprecated: the sharder has an option."""
    warnings.warn(
        "set_ec_index_dedup is deprecated; use EmbeddingCollectionSharder(use_index_dedup=...).",
        DeprecationWarning,
        stacklevel=2,
    )
    _dedup["is_on"] = bool(val)


def get_ec_index_dedup() -> bool:
    """Return whether all collections send each id once, whatever their sharders say.

    >>> get_ec_index_dedup()
    False
    """
    return _dedup["is_on"]


def create_embedding_sharding(
    sharding_type: str,
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
) -> EmbeddingSharding[SequenceShardingContext, KeyedJaggedTensor, torch.Tensor, torch.Tensor]:
    """Return the dists and lookups of one type of sharding, to be put together by hand.

    `ShardedEmbeddingCollection` does all of it in one step, for all types at once.
    """
    from tessera.distributed.sharding._types import SEQUENCES, make

    return make(SEQUENCES, sharding_type, sharding_infos, env, device, qcomm_codecs_registry)


def create_sharding_infos_by_sharding(
    module: EmbeddingCollectionInterface,
    table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    fused_params: dict[str, Any] | None,
) -> dict[str, list[EmbeddingShardingInfo]]:
    """Return what is known of each table, by type of sharding, in the order of first appearance.

    The parameter's own optimizer, set to run in backward, wins over `fused_params`.
    """
    configs = module.embedding_configs()
    return sharding_infos(
        _OPERATION, module, configs, table_name_to_parameter_sharding, "embeddings.", fused_params
    )


@dataclass
class EmbeddingCollectionContext(Multistreamable):
    """Belong to one batch. Where each id came from is kept by the engine, with the ids."""

    sharding_contexts: list[SequenceShardingContext] = field(default_factory=list)
    input_features: list[KeyedJaggedTensor] = field(default_factory=list)
    reverse_indices: list[torch.Tensor] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until `stream` has used them."""
        for part in (*self.sharding_contexts, *self.input_features, *self.reverse_indices):
            part.record_stream(stream)


class EmbeddingCollectionAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """Hold the rows of all tables on their way home."""

    def __init__(
        self, pending: Sequence[_C.sharding.PendingRows], names: Sequence[Mapping[str, str]]
    ) -> None:
        super().__init__()
        self._pending = pending
        self._names = names

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        parts = [jts_of(pending.wait()) for pending in self._pending]
        return {
            names[own]: rows
            for names, part in zip(self._names, parts, strict=True)
            for own, rows in part.items()
        }


class ShardedEmbeddingCollection(ShardedTables[dict[str, JaggedTensor], EmbeddingCollectionContext]):
    """Look up rows of tables that lie over the ranks as a plan says; made by its sharder.

    Collective: construction, forward, backward, loading from another sharding. Every rank puts in its own
    batch, of any size, also one for each feature, and gets the rows of its own ids. Tables may have
    different numbers of columns, and any type of sharding. With `use_index_dedup` a rank sends each id
    once and gets its row once: what travels changes, the results do not.

    Parameters are `embeddings.<table>.weight`. They, the state and `fused_params` are as those of
    `ShardedEmbeddingBagCollection`.
    """

    _OPERATION = _OPERATION
    _MODULE = EmbeddingCollection
    _TABLES = "embeddings"
    _CODECS = (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,)
    _SETTINGS = ("_need_indices", "_use_index_dedup")

    def __init__(
        self,
        module: EmbeddingCollectionInterface,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        *,
        local_size: int | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._need_indices = module.need_indices()
        self._use_index_dedup = use_index_dedup or get_ec_index_dedup()
        configs = module.embedding_configs()
        self._check(configs, table_name_to_parameter_sharding, env)
        infos = create_sharding_infos_by_sharding(module, table_name_to_parameter_sharding, fused_params)
        self._lay_out(configs, infos, env, device, local_size)

    def _new_options(self) -> _C.sharding.ShardedSequenceOptions:
        options = _engine.ShardedSequenceOptions()
        options.need_indices = self._need_indices
        options.use_index_dedup = self._use_index_dedup
        return options

    def _new_engine(self, tables, plan, options) -> _C.sharding.ShardedEmbeddingCollection:
        return _engine.ShardedEmbeddingCollection(tables, plan, self._env.process_group, options)

    # ---- one batch ----

    def create_context(self) -> EmbeddingCollectionContext:
        """Return the context of one batch."""
        return EmbeddingCollectionContext()

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[list]]:
        """Start sending the ids; all sizes go in one message. Collective.

        What is wrong with the features is raised by the first wait, alike on all ranks, and names rank and
        feature.
        """
        ctx.input_features.append(features)
        return self._send(features)

    def output_dist(self, ctx: EmbeddingCollectionContext, output: list) -> EmbeddingCollectionAwaitable:
        """Return the rows to come."""
        return EmbeddingCollectionAwaitable(output, self._names)

    def _traced(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return _traced_rows.apart(features, self._need_indices, [], self._anchor, self._outputs, self._reader)

    def _read(self, features: KeyedJaggedTensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = ShardedModule.forward(self, features).wait()
        return [found[name].values() for name, _, _ in self._outputs]

    def _sum(self, rows: dict[str, JaggedTensor]) -> torch.Tensor:
        return sum(each.values().sum() for each in rows.values())

    # ---- what others ask ----

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the tables."""
        return self._configs

    def need_indices(self) -> bool:
        """Return whether the ids go along as weights."""
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs, table by table."""
        return get_embedding_names_by_table(self._configs)


class EmbeddingCollectionSharder(CollectionSharder[EmbeddingCollection]):
    """Shard EmbeddingCollection. `fused_params` say how rows are stepped: optimizer, learning_rate, ..."""

    _SHARDED = ShardedEmbeddingCollection

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._use_index_dedup = use_index_dedup

    def _make(self, *args: Any, **own: Any) -> ShardedEmbeddingCollection:
        return super()._make(*args, use_index_dedup=self._use_index_dedup, **own)
