"""Tables over the ranks of a group, whatever is made of their rows: where they lie, how they are stepped."""

from __future__ import annotations

import abc
import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Proxy

from tessera import _C
from tessera.distributed._comm_op_nodes import native_codecs
from tessera.distributed._fused_optimizer import FusedTableOptimizer, kept_state
from tessera.distributed._row_cache import MeasuredCacheStatistics, host_rows, policy_of
from tessera.distributed._sharded_state import (
    LocalPart,
    load_table,
    sharded_row_state,
    sharded_tensor,
    with_global_ranks,
)
from tessera.distributed._shared_sizes import Engine, start_input_dists
from tessera.distributed.comm import get_local_size
from tessera.distributed.embedding_sharding import EmbeddingShardingInfo
from tessera.distributed.embedding_types import BaseEmbeddingSharder, M, ShardedEmbeddingModule
from tessera.distributed.sharding_plan import _from_engine, _to_engine
from tessera.distributed.types import (
    Awaitable,
    CommOp,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    LazyNoWait,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from tessera.distributed.utils import (
    _in_backward_params,
    _names_steps,
    _to_bounds_check,
    _to_options,
    add_params_from_parameter_sharding,
    merge_fused_params,
)
from tessera.modules import _traced_rows
from tessera.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingTableConfig,
    PoolingType,
    data_type_to_dtype,
)
from tessera.modules.embedding_configs import _to_engine as _config_to_engine
from tessera.modules.embedding_modules import TableDict, get_embedding_names_by_table
from tessera.optim.keyed import CombinedOptimizer
from tessera.sparse._traced import is_traced
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

Out = TypeVar("Out")
ShrdCtx = TypeVar("ShrdCtx")


def _table_fused_params(
    name: str, param: torch.Tensor, sharding: ParameterSharding, fused_params: dict[str, Any] | None
) -> dict[str, Any]:
    params = merge_fused_params(fused_params, _in_backward_params(param, name))
    is_stepped = sharding.compute_kernel != "dense"
    if not is_stepped and sharding.sharding_type != ShardingType.DATA_PARALLEL.value and _names_steps(params):
        warnings.warn(
            f"sharding.fused_params: table {name!r} has the kernel dense: backward leaves its gradient and "
            "steps nothing. Make the plan with the sharder that has these fused_params.",
            stacklevel=2,
        )
    return add_params_from_parameter_sharding(params, sharding) if is_stepped else params


def sharding_infos(
    operation: str,
    module: nn.Module,
    configs: Sequence[BaseEmbeddingConfig],
    table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    prefix: str,
    fused_params: dict[str, Any] | None,
    suffix: str | None = "weight",
    is_weighted: bool = False,
) -> dict[str, list[EmbeddingShardingInfo]]:
    """Return what is known of each table, by type of sharding, in the order of first appearance."""
    names = get_embedding_names_by_table(configs)
    parameters = dict(module.named_parameters())
    infos: dict[str, list[EmbeddingShardingInfo]] = {}
    for config, embedding_names in zip(configs, names, strict=True):
        if config.name not in table_name_to_parameter_sharding:
            raise ValueError(f"{operation}: the plan has no table '{config.name}'.")
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
                    pooling=getattr(config, "pooling", PoolingType.NONE),
                    is_weighted=is_weighted,
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


class _Table(nn.Module):
    """Own this rank's parts of one table: `weight`, `weight_1` and so on."""


@dataclass
class _Placed:
    """One table and where it lies."""

    config: BaseEmbeddingConfig
    sharding: _C.sharding.ParameterSharding
    kernel: str
    fused_params: dict[str, Any]


@dataclass
class _LastBatch:
    """What a batch without samples must have in common with those of the other ranks."""

    ids: torch.dtype = torch.int64
    is_weighted: bool = False
    wants_weight_gradient: bool = False


_OWN_PARAMS = ("gradients", "exact_row_norms")


def _step_key(table: _Placed) -> tuple:
    return tuple(sorted((name, str(value)) for name, value in table.fused_params.items()))


def _output_order(tables: list[_Placed]) -> list[_Placed]:
    """Return the tables of one engine as its results have them.

    By type of sharding, in order of first tables; in a type by the lowest rank.
    """
    types = list(dict.fromkeys(table.sharding.type for table in tables))
    return sorted(
        tables,
        key=lambda table: (
            types.index(table.sharding.type),
            min((shard.rank for shard in table.sharding.shards), default=0),
        ),
    )


class ShardedTables(ShardedEmbeddingModule[list, list, Out, ShrdCtx]):
    """Place tables as a plan says, one engine for every way of stepping rows, and keep their state.

    A subclass names its tables and makes its engines; `_SETTINGS` are its own attributes that a copy has.
    """

    _OPERATION: str
    _MODULE: type[nn.Module]  # what it was
    _TABLES: str  # the name of the tables among the module's children
    _CODECS: tuple[CommOp, ...]  # the first that a registry has is taken
    _SETTINGS: tuple[str, ...] = ()

    @abc.abstractmethod
    def _new_options(self) -> _C.sharding.ShardedOptions: ...

    @abc.abstractmethod
    def _new_engine(
        self,
        tables: list[_C.embedding.EmbeddingTableConfig],
        plan: dict[str, _C.sharding.ParameterSharding],
        options: _C.sharding.ShardedOptions,
    ) -> Engine: ...

    def _lay_out(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        infos: Mapping[str, list[EmbeddingShardingInfo]],
        env: ShardingEnv,
        device: torch.device | None,
        local_size: int | None,
    ) -> None:
        self._env = env
        self._local_size = local_size or get_local_size(env.world_size)
        self._device = torch.device(device or "cpu")
        self._configs = [copy.copy(config) for config in configs]
        by_name = {info.embedding_config.name: info for group in infos.values() for info in group}
        placed = [self._place(config, by_name[config.name]) for config in self._configs]
        self._build(placed)
        weights = {name: info.param for name, info in by_name.items()}
        if any(weight.is_meta for weight in weights.values()):
            self.reset_parameters()
        else:
            self._fill(weights)

    def _check(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
    ) -> None:
        if env.process_group is None:
            raise ValueError(f"{self._OPERATION}: the environment has no process group.")
        known = {config.name for config in configs}
        for name in table_name_to_parameter_sharding:
            if name not in known:
                raise ValueError(f"{self._OPERATION}: the plan has a table '{name}' that is not there.")

    def _place(self, config: BaseEmbeddingConfig, info: EmbeddingShardingInfo) -> _Placed:
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
        self._prefetch_stream: torch.cuda.Stream | None = None
        self._last_batch = _LastBatch()
        groups: dict[Any, list[_Placed]] = {}
        stepped = [table for table in placed if table.sharding.kernel != "dense"]
        first = _step_key(stepped[0]) if stepped else None
        for table in placed:
            is_dense = table.sharding.kernel == "dense"
            groups.setdefault(first if is_dense else _step_key(table), []).append(table)
        self._engines = [self._make_engine(tables) for tables in groups.values()]
        self._engine_tables = list(groups.values())
        self._names = [self._names_of(tables) for tables in groups.values()]
        # What a traced forward needs; the anchor gets a gradient, so that backward reaches the tables.
        self._reader = _traced_rows.name_of(self)
        self._anchor = torch.zeros(0, requires_grad=True)
        names_of = dict(
            zip((c.name for c in self._configs), get_embedding_names_by_table(self._configs), strict=True)
        )
        self._outputs = [
            (name, feature, table.config.embedding_dim)
            for tables in groups.values()
            for table in _output_order(tables)
            for name, feature in zip(names_of[table.config.name], table.config.feature_names, strict=True)
        ]
        self._parts: dict[str, list[LocalPart]] = {table.config.name: [] for table in placed}
        for engine in self._engines:
            for shard in engine.local_shards():
                self._parts[shard.table].append(LocalPart(shard.weight, shard.place))
        holders = TableDict({table.config.name: self._register(table) for table in placed})
        self.register_module(self._TABLES, holders)
        self._optimizer = self._make_optimizer()
        self._register_state_dict_hook(ShardedTables._replace_state)
        self._register_load_state_dict_pre_hook(ShardedTables._take_state, with_module=True)

    def _make_engine(self, tables: list[_Placed]) -> Engine:
        options = self._new_options()
        stepped = [table for table in tables if table.sharding.kernel != "dense"]
        params = dict((stepped or tables)[0].fused_params)
        gradients = params.pop("gradients", "fused").upper()
        if not stepped:
            gradients = "DENSE"
        elif gradients not in ("FUSED", "SPARSE"):
            raise ValueError(f"sharding.fused_params: gradients are {gradients!r}, not 'fused' or 'sparse'.")
        options.gradients = getattr(_C.embedding.GradientForm, gradients)
        options.exact_row_norms = bool(params.pop("exact_row_norms", False))
        options.bounds_check = _to_bounds_check(params.get("bounds_check_mode"))
        if stepped:
            options.optimizer = _to_options(params)
        options.codecs = native_codecs(self._codecs())
        options.local_size = self._local_size
        options.device = self._device
        if self._device.type == "cuda":
            options.host_rows = host_rows({table.config.name: table.kernel for table in tables}, params)
            options.cache_policy = policy_of(params)
        return self._new_engine(
            [_config_to_engine(table.config) for table in tables],
            {table.config.name: table.sharding for table in tables},
            options,
        )

    def _codecs(self) -> QuantizedCommCodecs | None:
        for operation in self._CODECS:
            if self.qcomm_codecs_registry and operation.name in self.qcomm_codecs_registry:
                return self.qcomm_codecs_registry[operation.name]
        return None

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
            weight._table_group = self._env.process_group
            weight._is_table_part = is_stepped or not self._is_replica(table)  # differs between ranks
            holder.register_parameter(f"weight_{place}" if place else "weight", weight)
        if not self._parts[table.config.name]:
            dtype = data_type_to_dtype(table.config.data_type)
            empty = torch.empty(0, dtype=dtype, device=self._device)
            holder.weight = nn.Parameter(empty, requires_grad=False)
            holder.weight._is_table_part = True
            holder.weight._table_group = self._env.process_group
        return holder

    def _make_optimizer(self) -> CombinedOptimizer:
        optims = []
        for engine, tables in zip(self._engines, self._engine_tables, strict=True):
            stepped = [table for table in tables if table.sharding.kernel != "dense"]
            if not stepped:
                continue
            options = _to_options({k: v for k, v in stepped[0].fused_params.items() if k not in _OWN_PARAMS})
            params: dict[str, torch.Tensor] = {}
            state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
            for table in stepped:
                if not self._parts[table.config.name]:
                    continue  # a rank knows the tables of which it has a part
                base = self._keys(table, "")[0]
                whole = self._whole(table)
                params[base] = whole
                state[whole] = self._state_of(engine, table, options.kind)
            accumulates = stepped[0].fused_params.get("gradients", "fused") == "sparse"
            optimizer = FusedTableOptimizer(engine, params, state, options, accumulates)
            for table in stepped:
                for part in self._parts[table.config.name]:
                    part.weight._in_backward_optimizers = [optimizer]
            optims.append(("", optimizer))
        return CombinedOptimizer(optims)

    def _whole(self, table: _Placed) -> torch.Tensor:
        """Return the table as its parameter on all ranks: sharded, or this rank's copy."""
        self.write_back()
        parts = self._parts[table.config.name]
        if self._is_replica(table):
            return parts[0].weight
        shape = (table.config.num_embeddings, table.config.embedding_dim)
        dtype = data_type_to_dtype(table.config.data_type)
        return sharded_tensor(shape, self._shards(table), parts, self._env.process_group, dtype)

    def _state_of(self, engine: Engine, table: _Placed, kind: Any) -> dict[str, torch.Tensor]:
        """Return what is kept beside a table, by name."""
        config, pg = table.config, self._env.process_group
        local = [shard for shard in engine.local_shards() if shard.table == config.name]
        found = {}
        for name, is_per_row in kept_state(kind).items():
            parts = [LocalPart(shard.state[name], shard.place) for shard in local]
            key = f"{config.name}.{name}"
            if self._is_replica(table):
                found[key] = parts[0].weight
            elif is_per_row:
                found[key] = sharded_row_state(config.num_embeddings, self._shards(table), parts, pg)
            else:
                shape = (config.num_embeddings, config.embedding_dim)
                found[key] = sharded_tensor(shape, self._shards(table), parts, pg, torch.float32)
        return found

    # ---- rows ----

    def _is_replica(self, table: _Placed) -> bool:
        return table.sharding.type == ShardingType.DATA_PARALLEL.value

    def _share_replicas(self) -> None:
        for table in self._placed:
            if self._is_replica(table) and self._env.world_size > 1:
                for part in self._parts[table.config.name]:
                    _C.broadcast_(part.weight.detach(), 0, self._env.process_group)

    def write_back(self) -> None:
        """Let rows that are cached in a GPU's memory go home, before parameters are read or written.

        State dicts and checkpoints do so by themselves.
        """
        for engine in self._engines:
            engine.write_back()

    def prefetch(self, dist_input: list, forward_stream: Any = None, ctx: Any = None) -> None:
        """Bring the rows of ids that are here into the caches, beside what the current stream does."""
        if not any(engine.cache_statistics() for engine in self._engines):
            return
        if self._prefetch_stream is None:
            self._prefetch_stream = torch.cuda.Stream(self._device)
        self._prefetch_stream.wait_stream(torch.cuda.current_stream(self._device))  # the ids
        with torch.cuda.stream(self._prefetch_stream):
            for engine, part in zip(self._engines, dist_input, strict=True):
                engine.prefetch(part)

    def cache_statistics(self) -> dict[str, MeasuredCacheStatistics]:
        """Return how the ids of each table with a cache used it on this rank."""
        return {
            each.table: MeasuredCacheStatistics(
                each.num_rows, each.cached_rows, each.num_calls, each.num_found, each.num_loaded
            )
            for engine in self._engines
            for each in engine.cache_statistics()
        }

    def _fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        for table in self._placed:
            self._load(table, weights[table.config.name].detach())
        self._share_replicas()

    def reset_parameters(self) -> None:
        """Fill this rank's parts anew with their tables' `init_fn`. Collective."""
        self.write_back()
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
        spec = _from_engine(table.sharding, table.kernel, kind, self._local_size).sharding_spec
        return with_global_ranks(spec.shards, self._env.process_group)

    def _load(self, table: _Placed, value: torch.Tensor) -> None:
        self.write_back()
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
        base = f"{prefix}{self._TABLES}.{table.config.name}.weight"
        further = len(self._parts[table.config.name]) - 1
        return [base, *(f"{base}_{number}" for number in range(1, further + 1))]

    def _replace_state(self, state_dict, prefix, local_metadata) -> None:
        for table in self._placed:
            if self._is_replica(table):
                continue
            base, *further = self._keys(table, prefix)
            for key in further:
                del state_dict[key]
            state_dict[base] = self._whole(table)

    def _take_state(self, state_dict, prefix, *unused) -> None:
        for table in self._placed:
            base, *further = self._keys(table, prefix)
            if base not in state_dict:
                continue
            self._load(table, state_dict[base])
            weights = dict(getattr(self, self._TABLES)[table.config.name].named_parameters())
            for key in (base, *further):
                state_dict[key] = weights[key.rsplit(".", 1)[1]].detach()

    def _checkpoint_tables(self) -> tuple[list, dict]:
        """Return this rank's parts with the state of what steps them, and that by table."""
        from tessera.checkpoint import TableShard

        shards, optimizers = [], {}
        for engine in self._engines:
            for local in engine.local_shards():
                found = [each for each in engine.optimizers() if each.has_table(local.name)]
                if not found:
                    continue
                table = next(t for t in self._placed if t.config.name == local.table)
                config = table.config
                optimizers[local.table] = found[0]
                shards.append(
                    TableShard(
                        local.table,
                        config.num_embeddings,
                        config.embedding_dim,
                        local.place.row,
                        local.place.column,
                        local.weight.detach(),
                        local.state,
                        self._is_replica(table),
                        found[0].stepped_rows(local.name),
                    )
                )
        return shards, optimizers

    def gather_tables(self) -> dict[str, torch.Tensor]:
        """Return the whole tables, on every rank. Collective; for small models."""
        return {name: rows for engine in self._engines for name, rows in engine.gather_tables().items()}

    # The engine has no copy: a copy is built anew and takes the rows and the optimizers' state.
    def __deepcopy__(self, memo: dict) -> ShardedTables:
        self.write_back()
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        ShardedEmbeddingModule.__init__(other, self.qcomm_codecs_registry)
        for name in ("_env", "_local_size", "_device", "_configs", *self._SETTINGS):
            setattr(other, name, getattr(self, name))
        other._build(self._placed)
        with torch.no_grad():
            for name, parts in self._parts.items():
                for mine, theirs in zip(other._parts[name], parts, strict=True):
                    mine.weight.copy_(theirs.weight)
        pairs = zip(self._optimizer.optimizers, other._optimizer.optimizers, strict=True)
        for (_, mine), (_, theirs) in pairs:
            mine.copy_to(theirs)
        other.train(self.training)
        return other

    # ---- one batch ----

    def _send(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[list]]:
        weights = features.weights_or_none()
        self._last_batch = _LastBatch(
            features.values().dtype, weights is not None, weights is not None and weights.requires_grad
        )
        return start_input_dists([(engine, features) for engine in self._engines], self._env.process_group)

    def compute(self, ctx: ShrdCtx, dist_input: list) -> list:
        """Read the rows; the engine starts sending them home at once."""
        return [
            engine.compute_and_output_dist(part)
            for engine, part in zip(self._engines, dist_input, strict=True)
        ]

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Out]:
        """Return the rows to come. Collective. Where torch traces, they are one operator of its graph."""
        if isinstance(features, Proxy):
            return _traced_rows.as_module_node(self, features)
        if is_traced(features.values()):
            return LazyNoWait(self._traced(features))
        return super().forward(features)

    @abc.abstractmethod
    def _traced(self, features: KeyedJaggedTensor) -> Out: ...

    @abc.abstractmethod
    def _sum(self, output: Out) -> torch.Tensor: ...

    def _empty_pass(self) -> torch.Tensor:
        """Take part in a pass of the other ranks without samples; return what backward starts from."""
        last = self._last_batch
        names = list(dict.fromkeys(name for config in self._configs for name in config.feature_names))
        weights = None
        if last.is_weighted or getattr(self, "_is_weighted", False):
            weights = torch.empty(0, requires_grad=last.wants_weight_gradient)
        lengths = torch.zeros(0, dtype=torch.int32)
        ids = torch.empty(0, dtype=last.ids)
        empty = KeyedJaggedTensor(keys=names, values=ids, weights=weights, lengths=lengths, stride=0)
        output = self(empty)
        return self._sum(output.wait() if isinstance(output, Awaitable) else output)

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

    def _tables_for_others(self) -> list[str]:
        """Return the tables of which a rank holds a part that an optimizer outside has to step."""
        return [
            table.config.name
            for table in self._placed
            if table.sharding.kernel == "dense" and not self._is_replica(table)
        ]

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
            f"{self._TABLES}.{table.config.name}.weight"
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
    def unsharded_module_type(self) -> type[nn.Module]:
        """Return the type of the module before it was sharded."""
        return self._MODULE


class CollectionSharder(BaseEmbeddingSharder[M]):
    """Shard a module whose tables are among its children; a subclass says which, and what it becomes."""

    _SHARDED: type[ShardedTables]

    def shard(
        self,
        module: M,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingModule:
        """Return the collection over the ranks of `env`. Collective."""
        return self._make(module, params, env, device)

    def _make(
        self, module: M, params: Mapping[str, ParameterSharding], env: ShardingEnv, device: Any, **own: Any
    ) -> ShardedTables:
        codecs = self.qcomm_codecs_registry
        return self._SHARDED(module, params, env, self.fused_params, device, codecs, **own)

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Return the tables by name."""
        return {name: table.weight for name, table in getattr(module, self._SHARDED._TABLES).items()}

    @property
    def module_type(self) -> type[M]:
        """Return the type of module that is sharded."""
        return self._SHARDED._MODULE
