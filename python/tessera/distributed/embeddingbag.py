"""Pooled lookups of tables that lie over the ranks of a group.

    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan = construct_module_sharding_plan(ebc, {"users": row_wise(), "items": table_wise(0)})
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, env)
    pooled = sharded(features)  # this rank's own samples; all ranks call it

Keys of the result are in the order of the shardings; use names, never places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from tessera import _C
from tessera.distributed._pooled_rows import (
    EmbeddingAwaitable,
    EmbeddingBagCollectionAwaitable,
    VariableBatchEmbeddingBagCollectionAwaitable,
    construct_output_kt,
)
from tessera.distributed._sharded_tables import CollectionSharder, ShardedTables, sharding_infos
from tessera.distributed.embedding_sharding import (
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from tessera.distributed.embedding_types import BaseEmbeddingSharder, ShardedEmbeddingModule
from tessera.distributed.types import (
    Awaitable,
    CommOp,
    LazyAwaitable,
    NullShardedModuleContext,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardedModule,
    ShardingEnv,
)
from tessera.modules import _traced_rows
from tessera.modules.embedding_configs import (
    EmbeddingBagConfig,
    PoolingType,
    dtype_to_data_type,
)
from tessera.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
)
from tessera.optim.keyed import CombinedOptimizer
from tessera.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from tessera.streamable import Multistreamable

__all__ = [
    "EmbeddingAwaitable",
    "EmbeddingBagCollectionAwaitable",
    "EmbeddingBagCollectionContext",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagSharder",
    "ShardedEmbeddingBag",
    "ShardedEmbeddingBagCollection",
    "VariableBatchEmbeddingBagCollectionAwaitable",
    "construct_output_kt",
    "create_embedding_bag_sharding",
    "create_sharding_infos_by_sharding",
    "replace_placement_with_meta_device",
]

_OPERATION = "sharding.embedding_bag_collection"
_engine = _C.sharding


def replace_placement_with_meta_device(sharding_infos: list[EmbeddingShardingInfo]) -> None:
    """Place every shard on the meta device, in place."""
    for info in sharding_infos:
        spec = info.param_sharding.sharding_spec
        if spec is None:
            continue
        if not isinstance(spec, EnumerableShardingSpec):
            raise ValueError(f"sharding.meta: {type(spec).__name__} has no list of shards.")
        for shard in spec.shards:
            shard.placement = torch.distributed._remote_device(f"rank:{shard.placement.rank()}/meta")


def create_embedding_bag_sharding(
    sharding_type: str,
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    permute_embeddings: bool = False,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
) -> EmbeddingSharding[EmbeddingShardingContext, KeyedJaggedTensor, torch.Tensor, torch.Tensor]:
    """Return the dists and lookups of pooled tables of one type of sharding, to be put together by hand.

    `ShardedEmbeddingBagCollection` does all of it in one step, for all types at once. On the meta device
    the shards are placed there.
    """
    from tessera.distributed.sharding._types import POOLED, make

    if device is not None and device.type == "meta":
        replace_placement_with_meta_device(sharding_infos)
    return make(POOLED, sharding_type, sharding_infos, env, device, qcomm_codecs_registry, permute_embeddings)


def create_sharding_infos_by_sharding(
    module: EmbeddingBagCollectionInterface,
    table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    prefix: str,
    fused_params: dict[str, Any] | None,
    suffix: str | None = "weight",
) -> dict[str, list[EmbeddingShardingInfo]]:
    """Return what is known of each table, by type of sharding, in the order of first appearance.

    `prefix` and `suffix` are around the table's name in the name of its parameter. The parameter's own
    optimizer, set to run in backward, wins over `fused_params`.
    """
    return sharding_infos(
        _OPERATION,
        module,
        module.embedding_bag_configs(),
        table_name_to_parameter_sharding,
        prefix,
        fused_params,
        suffix,
        module.is_weighted(),
    )


@dataclass
class EmbeddingBagCollectionContext(Multistreamable):
    """Belong to one batch. Sizes and orders are kept by the engine, with the ids."""

    sharding_contexts: list[EmbeddingShardingContext | None] = field(default_factory=list)
    inverse_indices: tuple[list[str], torch.Tensor] | None = None
    variable_batch_per_feature: bool = False

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until `stream` has used them."""
        if self.inverse_indices is not None:
            self.inverse_indices[1].record_stream(stream)


class ShardedEmbeddingBagCollection(ShardedTables[KeyedTensor, EmbeddingBagCollectionContext]):
    """Pool the rows of tables that lie over the ranks as a plan says; made by its sharder.

    Collective: construction, forward, backward, loading from another sharding. Every rank puts in its own
    batch, of any size, and gets its own samples. Fused tables are stepped by backward; tables with
    different optimizers may be mixed. If the module has weights, the shards are cut out of this rank's
    copy of them; otherwise (meta device) each is filled by the table's `init_fn`. Whole copies are those
    of rank 0.

    Parameters are `embedding_bags.<table>.weight`, this rank's part; further parts of a table on one rank
    are `weight_1` and so on, and a rank without a part has an empty one. `state_dict` has sharded tensors
    under the unsharded names; `load_state_dict` takes those of any sharding, and whole tensors.
    `fused_params` may say `gradients="sparse"`: backward then leaves gradients of rows, which add up over
    passes, and the fused optimizer steps; and `exact_row_norms=True`: rules that read the norm of a row
    take it over all columns of a column-wise table.
    """

    _OPERATION = _OPERATION
    _MODULE = EmbeddingBagCollection
    _TABLES = "embedding_bags"
    _CODECS = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
    _SETTINGS = ("_is_weighted", "_weights_come_later", "_longest_bags")

    def __init__(
        self,
        module: EmbeddingBagCollectionInterface,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        local_size: int | None = None,
        weights_come_later: bool = False,
        longest_bags: Sequence[tuple[str, int]] = (),
    ) -> None:
        """With `weights_come_later` weights are given to `compute_weighted`, not with the features.

        Features with bags longer than `longest_bags` says are the same ValueError on all ranks.
        """
        super().__init__(qcomm_codecs_registry)
        self._is_weighted = module.is_weighted()
        self._weights_come_later = weights_come_later
        self._longest_bags = list(longest_bags)
        configs = module.embedding_bag_configs()
        self._check(configs, table_name_to_parameter_sharding, env)
        infos = create_sharding_infos_by_sharding(
            module, table_name_to_parameter_sharding, f"{self._TABLES}.", fused_params
        )
        self._lay_out(configs, infos, env, device, local_size)

    def _new_options(self) -> _C.sharding.ShardedOptions:
        options = _engine.ShardedOptions()
        options.weights_come_later = self._weights_come_later
        options.longest_bags = self._longest_bags
        return options

    def _new_engine(self, tables, plan, options) -> _C.sharding.ShardedEmbeddingBagCollection:
        return _engine.ShardedEmbeddingBagCollection(
            tables, plan, self._env.process_group, self._is_weighted, options
        )

    # ---- one batch ----

    def create_context(self) -> EmbeddingBagCollectionContext:
        """Return the context of one batch."""
        return EmbeddingBagCollectionContext()

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[list]]:
        """Start sending the ids; all sizes go in one message. Collective.

        What is wrong with the features is raised by the first wait, alike on all ranks, and names rank and
        feature.
        """
        ctx.variable_batch_per_feature = features.variable_stride_per_key()
        ctx.inverse_indices = features.inverse_indices_or_none()
        return self._send(features)

    def compute_weighted(self, dist_input: list, weights: torch.Tensor) -> list:
        """Send one weight for each id of the features that came in, then read the rows. Collective."""
        return [
            engine.compute_and_output_dist(part, weights)
            for engine, part in zip(self._engines, dist_input, strict=True)
        ]

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list
    ) -> EmbeddingBagCollectionAwaitable:
        """Return the rows to come."""
        return EmbeddingBagCollectionAwaitable(output, self._names)

    def _traced(self, features: KeyedJaggedTensor) -> KeyedTensor:
        names = [name for name, _, _ in self._outputs]
        dims = [dim for _, _, dim in self._outputs]
        return _traced_rows.pooled(features, self._is_weighted, [], self._anchor, names, dims, self._reader)

    def _read(self, features: KeyedJaggedTensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = ShardedModule.forward(self, features).wait()
        names = [name for name, _, _ in self._outputs]
        if found.keys() != names:  # a graph goes by places
            raise RuntimeError(f"sharding: a traced model expects {names}, the tables gave {found.keys()}.")
        return [found.values()]

    def _sum(self, pooled: KeyedTensor) -> torch.Tensor:
        return pooled.values().sum()

    # ---- what others ask ----

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether the features' weights multiply the rows."""
        return self._is_weighted


class EmbeddingBagCollectionSharder(CollectionSharder[EmbeddingBagCollection]):
    """Shard EmbeddingBagCollection. `fused_params` say how rows are stepped: optimizer, learning_rate, ..."""

    _SHARDED = ShardedEmbeddingBagCollection


_FEATURE = "feature"


class _OneTable(EmbeddingBagCollectionInterface):
    """Show a torch EmbeddingBag as a collection of one table, weighted with ones unless told."""

    def __init__(self, module: nn.EmbeddingBag) -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict({"weight": module})
        self._config = EmbeddingBagConfig(
            module.num_embeddings,
            module.embedding_dim,
            "weight",
            dtype_to_data_type(module.weight.dtype),
            [_FEATURE],
            init_fn=torch.nn.init.normal_,
            pooling=PoolingType.SUM if module.mode == "sum" else PoolingType.MEAN,
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        raise NotImplementedError

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return [self._config]

    def is_weighted(self) -> bool:
        return True


class ShardedEmbeddingBag(ShardedEmbeddingModule[list, list, torch.Tensor, NullShardedModuleContext]):
    """Be torch's EmbeddingBag over the ranks of a group, any type of sharding, sum or mean.

    The parameter is `weight`, this rank's part; the state has it as a sharded tensor.
    """

    def __init__(
        self,
        module: nn.EmbeddingBag,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if module.mode == "max" or module.padding_idx is not None or module.max_norm is not None:
            raise ValueError(
                "sharding.embedding_bag: mode 'max', padding_idx and max_norm cannot be sharded."
            )
        self._include_last_offset = module.include_last_offset
        self._bags = ShardedEmbeddingBagCollection(
            _OneTable(module), table_name_to_parameter_sharding, env, fused_params, device
        )
        self._register_state_dict_hook(ShardedEmbeddingBag._shorten)
        self._register_load_state_dict_pre_hook(ShardedEmbeddingBag._lengthen, with_module=True)

    def _shorten(self, state_dict, prefix, local_metadata) -> None:
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}_bags.embedding_bags.weight.weight")

    def _lengthen(self, state_dict, prefix, *unused) -> None:
        if f"{prefix}weight" in state_dict:
            state_dict[f"{prefix}_bags.embedding_bags.weight.weight"] = state_dict.pop(f"{prefix}weight")

    def create_context(self) -> NullShardedModuleContext:
        """Return nothing to keep."""
        return NullShardedModuleContext()

    def input_dist(
        self,
        ctx: NullShardedModuleContext,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> Awaitable[Awaitable[list]]:
        """Start sending the ids: bags of equal length if they are 2-D, else as `offsets` say."""
        if (input.dim() == 2) != (offsets is None):
            raise ValueError("sharding.embedding_bag: give offsets with 1-D ids, and only with them.")
        if offsets is None:
            lengths = torch.full((input.size(0),), input.size(1), dtype=torch.long)
        else:
            end = torch.tensor([input.numel()], dtype=offsets.dtype, device=offsets.device)
            ends = offsets if self._include_last_offset else torch.cat([offsets, end])
            lengths = torch.diff(ends)
        weights = torch.ones(input.numel()) if per_sample_weights is None else per_sample_weights.reshape(-1)
        features = KeyedJaggedTensor.from_lengths_sync([_FEATURE], input.reshape(-1), lengths, weights)
        return self._bags.input_dist(EmbeddingBagCollectionContext(), features)

    def compute(self, ctx: NullShardedModuleContext, dist_input: list) -> list:
        """Read the rows."""
        return self._bags.compute(None, dist_input)

    def output_dist(self, ctx: NullShardedModuleContext, output: list) -> LazyAwaitable[torch.Tensor]:
        """Return the rows to come."""
        return EmbeddingAwaitable(self._bags.output_dist(None, output))

    def _empty_pass(self) -> torch.Tensor:
        return self._bags._empty_pass()

    def _tables_for_others(self) -> list[str]:
        return self._bags._tables_for_others()

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True):
        """Return this rank's parts: `weight`, `weight_1` and so on."""
        for name, weight in self._bags.embedding_bags["weight"].named_parameters():
            yield f"{prefix}.{name}" if prefix else name, weight

    def sharded_parameter_names(self, prefix: str = ""):
        """Return the names of parameters that data parallelism must leave alone, as the module has them."""
        for name in self._bags.sharded_parameter_names("_bags"):
            yield f"{prefix}.{name}" if prefix else name

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Return the optimizer of the table, if its rows are stepped here."""
        return self._bags.fused_optimizer

    @property
    def unsharded_module_type(self) -> type[nn.EmbeddingBag]:
        """Return torch's EmbeddingBag."""
        return nn.EmbeddingBag


class EmbeddingBagSharder(BaseEmbeddingSharder[nn.EmbeddingBag]):
    """Shard torch's EmbeddingBag; its one table is called `weight`."""

    def shard(
        self,
        module: nn.EmbeddingBag,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBag:
        """Return the bag over the ranks of `env`. Collective."""
        return ShardedEmbeddingBag(module, params, env, self.fused_params, device)

    def shardable_parameters(self, module: nn.EmbeddingBag) -> dict[str, nn.Parameter]:
        """Return the one table."""
        return {name: param for name, param in module.named_parameters() if name == "weight"}

    @property
    def module_type(self) -> type[nn.EmbeddingBag]:
        """Return torch's EmbeddingBag."""
        return nn.EmbeddingBag
