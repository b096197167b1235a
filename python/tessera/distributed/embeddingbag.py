"""Pooled lookups of tables that lie over the ranks of a group.

    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan = construct_module_sharding_plan(ebc, {"users": row_wise(), "items": table_wise(0)})
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, env)
    pooled = sharded(features)  # this rank's own samples; all ranks call it

Keys of the result are in the order of the shardings; use names, never places.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from tessera import _C
from tessera.distributed._fused_optimizer import FusedTableOptimizer
from tessera.distributed._sharded_state import LocalPart, load_table, sharded_tensor
from tessera.distributed.comm import get_local_size
from tessera.distributed.comm_ops import _native
from tessera.distributed.embedding_sharding import EmbeddingShardingContext, EmbeddingShardingInfo
from tessera.distributed.embedding_types import BaseEmbeddingSharder, ShardedEmbeddingModule
from tessera.distributed.sharding_plan import _from_engine, _to_engine
from tessera.distributed.types import (
    Awaitable,
    CommOp,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    NullShardedModuleContext,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from tessera.distributed.utils import (
    _in_backward_params,
    _to_bounds_check,
    _to_options,
    add_params_from_parameter_sharding,
    merge_fused_params,
)
from tessera.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingTableConfig,
    PoolingType,
    dtype_to_data_type,
)
from tessera.modules.embedding_configs import _to_engine as _config_to_engine
from tessera.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
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
    "construct_output_kt",
    "create_sharding_infos_by_sharding",
    "replace_placement_with_meta_device",
]

_engine = _C.sharding


def construct_output_kt(
    embeddings: list[torch.Tensor], embedding_names: list[str], embedding_dims: list[int]
) -> KeyedTensor:
    """Return the outputs of several shardings side by side, under their names.

    >>> construct_output_kt([torch.ones(2, 1), torch.zeros(2, 2)], ["a", "b"], [1, 2])["b"].shape
    torch.Size([2, 2])
    """
    values = embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=1)
    return KeyedTensor(embedding_names, embedding_dims, values)


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


def _table_fused_params(
    name: str, param: torch.Tensor, sharding: ParameterSharding, fused_params: dict[str, Any] | None
) -> dict[str, Any]:
    params = merge_fused_params(fused_params, _in_backward_params(param, name))
    is_stepped = sharding.compute_kernel != "dense"
    return add_params_from_parameter_sharding(params, sharding) if is_stepped else params


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
    configs = module.embedding_bag_configs()
    names = get_embedding_names_by_table(configs)
    parameters = dict(module.named_parameters())
    infos: dict[str, list[EmbeddingShardingInfo]] = {}
    for config, embedding_names in zip(configs, names, strict=True):
        if config.name not in table_name_to_parameter_sharding:
            raise ValueError(f"sharding.embedding_bag_collection: the plan has no table '{config.name}'.")
        sharding = table_name_to_parameter_sharding[config.name]
        param = parameters[f"{prefix}{config.name}" + (f".{suffix}" if suffix else "")]
        infos.setdefault(sharding.sharding_type, []).append(
            EmbeddingShardingInfo(
                embedding_config=EmbeddingTableConfig(
                    num_embeddings=config.num_embeddings,
                    embedding_dim=config.embedding_dim,
                    name=config.name,
                    data_type=config.data_type,
                    feature_names=list(config.feature_names),
                    pooling=config.pooling,
                    is_weighted=module.is_weighted(),
                    embedding_names=embedding_names,
                    weight_init_max=config.weight_init_max,
                    weight_init_min=config.weight_init_min,
                    init_fn=config.init_fn,
                ),
                param_sharding=sharding,
                param=param,
                fused_params=_table_fused_params(config.name, param, sharding, fused_params),
            )
        )
    return infos


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


class _PendingInputs(Awaitable[list]):
    def __init__(self, pending: Sequence[Any]) -> None:
        super().__init__()
        self._pending = pending

    def _wait_impl(self) -> list:
        return [pending.wait() for pending in self._pending]


class _PendingSplits(Awaitable[Awaitable[list]]):
    def __init__(self, pending: Sequence[Any]) -> None:
        super().__init__()
        self._pending = pending

    def _wait_impl(self) -> Awaitable[list]:
        return _PendingInputs([pending.wait() for pending in self._pending])


class EmbeddingBagCollectionAwaitable(LazyAwaitable[KeyedTensor]):
    """Hold the pooled rows of all tables on their way home."""

    def __init__(
        self, pending: Sequence[_C.sharding.PendingPooled], names: Sequence[Mapping[str, str]]
    ) -> None:
        super().__init__()
        self._pending = pending
        self._names = names

    def _wait_impl(self) -> KeyedTensor:
        parts = [pending.wait() for pending in self._pending]
        if len(parts) == 1:
            return parts[0]
        keys = [names[key] for names, part in zip(self._names, parts, strict=True) for key in part.keys()]  # noqa: SIM118
        dims = [dim for part in parts for dim in part.length_per_key()]
        return construct_output_kt([part.values() for part in parts], keys, dims)


class _Table(nn.Module):
    """Own this rank's parts of one table: `weight`, `weight_1` and so on."""


@dataclass
class _Placed:
    """One table and where it lies."""

    config: EmbeddingBagConfig
    sharding: _C.sharding.ParameterSharding
    kernel: str
    fused_params: dict[str, Any]


def _codecs(registry: Mapping[str, QuantizedCommCodecs] | None) -> QuantizedCommCodecs | None:
    for operation in (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER):
        if registry and operation.name in registry:
            return registry[operation.name]
    return None


class ShardedEmbeddingBagCollection(
    ShardedEmbeddingModule[list, list, KeyedTensor, EmbeddingBagCollectionContext]
):
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
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        if env.process_group is None:
            raise ValueError("sharding.embedding_bag_collection: the environment has no process group.")
        self._env = env
        self._local_size = local_size or get_local_size(env.world_size)
        self._device = torch.device(device or "cpu")
        self._is_weighted = module.is_weighted()
        self._configs = [copy.copy(config) for config in module.embedding_bag_configs()]
        known = {config.name for config in self._configs}
        for name in table_name_to_parameter_sharding:
            if name not in known:
                raise ValueError(
                    f"sharding.embedding_bag_collection: the plan has a table '{name}' that is not there."
                )
        infos = create_sharding_infos_by_sharding(
            module, table_name_to_parameter_sharding, "embedding_bags.", fused_params
        )
        by_name = {info.embedding_config.name: info for group in infos.values() for info in group}
        placed = [self._place(config, by_name[config.name]) for config in self._configs]
        self._build(placed)
        weights = {name: info.param for name, info in by_name.items()}
        if any(weight.is_meta for weight in weights.values()):
            self.reset_parameters()
        else:
            self._fill(weights)

    def _place(self, config: EmbeddingBagConfig, info: EmbeddingShardingInfo) -> _Placed:
        sharding = _to_engine(
            config.name,
            info.param_sharding,
            config.num_embeddings,
            config.embedding_dim,
            self._env.world_size,
            self._local_size,
        )
        return _Placed(config, sharding, info.param_sharding.compute_kernel, info.fused_params or {})

    def _build(self, placed: list[_Placed]) -> None:
        """Make the engines, one for every way of stepping rows, and register their parts."""
        self._placed = placed
        groups: dict[Any, list[_Placed]] = {}
        stepped = [table for table in placed if table.sharding.kernel != "dense"]
        first = _step_key(stepped[0]) if stepped else None
        for table in placed:
            is_dense = table.sharding.kernel == "dense"
            groups.setdefault(first if is_dense else _step_key(table), []).append(table)
        self._engines = [self._make_engine(tables) for tables in groups.values()]
        self._engine_tables = list(groups.values())
        self._names = [self._names_of(tables) for tables in groups.values()]
        self._parts: dict[str, list[LocalPart]] = {table.config.name: [] for table in placed}
        for engine in self._engines:
            for shard in engine.local_shards():
                self._parts[shard.table].append(LocalPart(shard.weight, shard.place))
        self.embedding_bags = nn.ModuleDict()
        for table in placed:
            self.embedding_bags[table.config.name] = self._register(table)
        self._optimizer = self._make_optimizer()
        self._register_state_dict_hook(ShardedEmbeddingBagCollection._replace_state)
        self._register_load_state_dict_pre_hook(ShardedEmbeddingBagCollection._take_state, with_module=True)

    def _make_engine(self, tables: list[_Placed]) -> _C.sharding.ShardedEmbeddingBagCollection:
        options = _engine.ShardedOptions()
        stepped = [table for table in tables if table.sharding.kernel != "dense"]
        params = dict((stepped or tables)[0].fused_params)
        gradients = params.pop("gradients", "fused").upper()
        if gradients not in ("FUSED", "SPARSE"):
            raise ValueError(f"sharding.fused_params: gradients are {gradients!r}, not 'fused' or 'sparse'.")
        options.gradients = getattr(_C.embedding.GradientForm, gradients)
        options.exact_row_norms = bool(params.pop("exact_row_norms", False))
        options.bounds_check = _to_bounds_check(params.get("bounds_check_mode"))
        if stepped:
            options.optimizer = _to_options(params)
        options.codecs = _native(_codecs(self.qcomm_codecs_registry))
        options.local_size = self._local_size
        options.device = self._device
        return _engine.ShardedEmbeddingBagCollection(
            [_config_to_engine(table.config) for table in tables],
            {table.config.name: table.sharding for table in tables},
            self._env.process_group,
            self._is_weighted,
            options,
        )

    def _names_of(self, tables: list[_Placed]) -> dict[str, str]:
        """Return what the outputs of one engine are called among those of all."""
        everywhere = dict(
            zip((c.name for c in self._configs), get_embedding_names_by_table(self._configs), strict=True)
        )
        here = get_embedding_names_by_table([table.config for table in tables])
        return {
            own: name
            for table, names in zip(tables, here, strict=True)
            for own, name in zip(names, everywhere[table.config.name], strict=True)
        }

    def _register(self, table: _Placed) -> _Table:
        holder = _Table()
        is_stepped = table.sharding.kernel != "dense"
        for place, part in enumerate(self._parts[table.config.name]):
            weight = part.weight
            weight._is_param = True  # the engine's tensor itself: its gradient is the parameter's
            if is_stepped:
                weight._in_backward_optimizers = []  # marks parameters that a dense optimizer must leave
            weight._is_table_part = is_stepped or not self._is_replica(table)  # differs between ranks
            holder.register_parameter(f"weight_{place}" if place else "weight", weight)
        if not self._parts[table.config.name]:
            holder.weight = nn.Parameter(torch.empty(0, device=self._device), requires_grad=False)
            holder.weight._is_table_part = True
        return holder

    def _make_optimizer(self) -> CombinedOptimizer:
        optims = []
        for place, (engine, tables) in enumerate(zip(self._engines, self._engine_tables, strict=True)):
            stepped = [table for table in tables if table.sharding.kernel != "dense"]
            if not stepped:
                continue
            params = {
                f"embedding_bags.{table.config.name}.weight" + (f"_{number}" if number else ""): part.weight
                for table in stepped
                for number, part in enumerate(self._parts[table.config.name])
            }
            options = {k: v for k, v in stepped[0].fused_params.items() if k not in _OWN_PARAMS}
            rate = _to_options(options).learning_rate
            accumulates = stepped[0].fused_params.get("gradients", "fused") == "sparse"
            name = "" if len(self._engines) == 1 else str(place)
            optims.append((name, FusedTableOptimizer(engine, params, rate, accumulates)))
        return CombinedOptimizer(optims)

    # ---- rows ----

    def _is_replica(self, table: _Placed) -> bool:
        return table.sharding.type == ShardingType.DATA_PARALLEL.value

    def _share_replicas(self) -> None:
        for table in self._placed:
            if self._is_replica(table) and self._env.world_size > 1:
                for part in self._parts[table.config.name]:
                    _C.broadcast_(part.weight.detach(), 0, self._env.process_group)

    def _fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        for table in self._placed:
            self._load(table, weights[table.config.name].detach())
        self._share_replicas()

    def reset_parameters(self) -> None:
        """Fill this rank's parts anew with their tables' `init_fn`. Collective."""
        with torch.no_grad():
            for table in self._placed:
                for part in self._parts[table.config.name]:
                    if part.weight.numel():
                        table.config.init_fn(part.weight.detach())
        self._share_replicas()

    # ---- state ----

    def _shards(self, table: _Placed):
        if self._is_replica(table):
            return None
        kind = self._device.type
        return _from_engine(table.sharding, table.kernel, kind, self._local_size).sharding_spec.shards

    def _load(self, table: _Placed, value: torch.Tensor) -> None:
        shape = (table.config.num_embeddings, table.config.embedding_dim)
        load_table(
            table.config.name,
            shape,
            self._shards(table),
            self._parts[table.config.name],
            value,
            self._env.process_group,
        )

    def _keys(self, table: _Placed, prefix: str) -> list[str]:
        base = f"{prefix}embedding_bags.{table.config.name}.weight"
        further = len(self._parts[table.config.name]) - 1
        return [base, *(f"{base}_{number}" for number in range(1, further + 1))]

    def _replace_state(self, state_dict, prefix, local_metadata) -> None:
        for table in self._placed:
            if self._is_replica(table):
                continue
            base, *further = self._keys(table, prefix)
            for key in further:
                del state_dict[key]
            shape = (table.config.num_embeddings, table.config.embedding_dim)
            parts = self._parts[table.config.name]
            state_dict[base] = sharded_tensor(shape, self._shards(table), parts, self._env.process_group)

    def _take_state(self, state_dict, prefix, *unused) -> None:
        for table in self._placed:
            base, *further = self._keys(table, prefix)
            if base not in state_dict:
                continue
            self._load(table, state_dict[base])
            weights = dict(self.embedding_bags[table.config.name].named_parameters())
            for key in (base, *further):
                state_dict[key] = weights[key.rsplit(".", 1)[1]].detach()

    def gather_tables(self) -> dict[str, torch.Tensor]:
        """Return the whole tables, on every rank. Collective; for small models."""
        return {name: rows for engine in self._engines for name, rows in engine.gather_tables().items()}

    # The engine has no copy: a copy is built anew and takes the rows and the optimizers' state.
    def __deepcopy__(self, memo: dict) -> ShardedEmbeddingBagCollection:
        other = ShardedEmbeddingBagCollection.__new__(ShardedEmbeddingBagCollection)
        memo[id(self)] = other
        ShardedEmbeddingModule.__init__(other, self.qcomm_codecs_registry)
        for name in ("_env", "_local_size", "_device", "_is_weighted", "_configs"):
            setattr(other, name, getattr(self, name))
        other._build(self._placed)
        with torch.no_grad():
            for name, parts in self._parts.items():
                for mine, theirs in zip(other._parts[name], parts, strict=True):
                    mine.weight.copy_(theirs.weight)
        other._optimizer.load_state_dict(self._optimizer.state_dict())
        other.train(self.training)
        return other

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
        return _PendingSplits(_engine.fused_input_dist([(engine, features) for engine in self._engines]))

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: list) -> list:
        """Read the rows; the engine starts sending them home at once."""
        return [
            engine.compute_and_output_dist(part)
            for engine, part in zip(self._engines, dist_input, strict=True)
        ]

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list
    ) -> EmbeddingBagCollectionAwaitable:
        """Return the rows to come."""
        return EmbeddingBagCollectionAwaitable(output, self._names)

    # ---- what others ask ----

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Return the optimizers of the tables whose rows are stepped here."""
        return self._optimizer

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients of tables that accumulate them to this 2-norm over all ranks. Collective."""
        if len(self._engines) == 1:
            return self._engines[0].clip_grad_norm(max_norm)
        norms = [engine.clip_grad_norm(float("inf")) for engine in self._engines]
        total = sum(norm**2 for norm in norms) ** 0.5
        if total > max_norm:
            for engine, norm in zip(self._engines, norms, strict=True):
                engine.clip_grad_norm(norm * max_norm / total)
        return total

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether the features' weights multiply the rows."""
        return self._is_weighted

    def module_sharding_plan(self) -> EmbeddingModuleShardingPlan:
        """Return how the tables lie."""
        kind = self._device.type
        return EmbeddingModuleShardingPlan(
            {
                table.config.name: _from_engine(table.sharding, table.kernel, kind, self._local_size)
                for table in self._placed
            }
        )

    def _replica_parameters(self) -> set[str]:
        """Return the names of whole tables that leave a gradient, for data parallelism to average."""
        return {
            f"embedding_bags.{table.config.name}.weight"
            for table in self._placed
            if self._is_replica(table) and table.sharding.kernel == "dense"
        }

    def sharded_parameter_names(self, prefix: str = ""):
        """Return the names of parameters that data parallelism must leave alone."""
        replicas = self._replica_parameters()
        for name, _ in self.named_parameters():
            if name not in replicas:
                yield f"{prefix}.{name}" if prefix else name

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """Return EmbeddingBagCollection."""
        return EmbeddingBagCollection


_OWN_PARAMS = ("gradients", "exact_row_norms")


def _step_key(table: _Placed) -> tuple:
    return tuple(sorted((name, str(value)) for name, value in table.fused_params.items()))


class EmbeddingBagCollectionSharder(BaseEmbeddingSharder[EmbeddingBagCollection]):
    """Shard EmbeddingBagCollection. `fused_params` say how rows are stepped: optimizer, learning_rate, ..."""

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """Return the collection over the ranks of `env`. Collective."""
        return ShardedEmbeddingBagCollection(
            module, params, env, self.fused_params, device, self.qcomm_codecs_registry
        )

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Return the tables by name."""
        return {name: table.weight for name, table in module.embedding_bags.items()}

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """Return EmbeddingBagCollection."""
        return EmbeddingBagCollection


class EmbeddingAwaitable(LazyAwaitable[torch.Tensor]):
    """Hold pooled rows on their way home."""

    def __init__(self, awaitable: Awaitable[KeyedTensor]) -> None:
        super().__init__()
        self._awaitable = awaitable

    def _wait_impl(self) -> torch.Tensor:
        return self._awaitable.wait().values()


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
