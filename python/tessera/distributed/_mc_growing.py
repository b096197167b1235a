"""Growing tables over ranks: ids owned by buckets of their hash, rows where their ids are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tessera import _C
from tessera.distributed._comm_op_nodes import native_codecs
from tessera.distributed._fused_optimizer import kept_state
from tessera.distributed._shared_sizes import start_input_dists
from tessera.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingType
from tessera.distributed.utils import _to_options
from tessera.modules.embedding_configs import _to_engine as _config_to_engine
from tessera.modules.embedding_modules import get_embedding_names_by_table
from tessera.modules.mc_modules import GrowingManagedCollisionModule
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

_engine = _C.collision
_LISTS = ("ids", "counts", "last_steps", "sketch_buckets", "sketch_counters", "sketch_sightings")
GROWING_TYPES = (ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value)
_UNKNOWN = {"row": "ROW", "zero": "ZERO", "init": "INIT"}


def growing_modules(module: nn.Module) -> dict[str, GrowingManagedCollisionModule]:
    """Return the growing modules of a collection by table. Raises ValueError if some grow and some do not."""
    modules = dict(module._managed_collision_collection._managed_collision_modules.items())
    growing = {n: m for n, m in modules.items() if isinstance(m, GrowingManagedCollisionModule)}
    if growing and len(growing) < len(modules):
        fixed = next(name for name in modules if name not in growing)
        raise ValueError(
            f"collision.sharded: table '{next(iter(growing))}' grows and table '{fixed}' does not. Shard "
            "tables that grow in a collection of their own."
        )
    return growing


def _wish(table: str, sharding: ParameterSharding) -> _C.sharding.Placement:
    if sharding.sharding_type == ShardingType.ROW_WISE.value:
        return _C.sharding.row_wise([])
    if sharding.sharding_type == ShardingType.TABLE_WISE.value:
        return _C.sharding.table_wise(sharding.ranks[0])
    raise ValueError(
        f"collision.sharded: table '{table}' is to lie {sharding.sharding_type}; growing tables lie row_wise "
        "or table_wise."
    )


class GrowingEngine:
    """Hold the growing tables of a collection, over the ranks of `env`.

    State has the names and layout of the collection on one rank, whole on every rank, so that it loads
    into any number of them.
    """

    def __init__(
        self,
        module: nn.Module,
        modules: Mapping[str, GrowingManagedCollisionModule],
        shardings: Mapping[str, ParameterSharding],
        fused_params: Mapping[str, Any] | None,
        codecs: Any,
        env: ShardingEnv,
    ) -> None:
        if module._return_remapped_features:
            raise ValueError(
                "collision.sharded: rows of growing tables have numbers on their own rank alone. Make the "
                "collection without return_remapped_features."
            )
        tables = module._embedding_module
        self._configs = list(tables._configs)
        self._modules = dict(modules)
        self._env = env
        self._children = module._TABLES
        is_pooled = module._TABLES == "embedding_bags"
        kind = _engine.GrowingEmbeddingBagCollection if is_pooled else _engine.GrowingEmbeddingCollection
        options = _engine.GrowingOptions()
        options.optimizer = self._optimizer_options(tables, fused_params)
        self._kept = kept_state(options.optimizer.kind)  # names of state, and whether it is one per row
        options.codecs = native_codecs(codecs)
        wishes = {c.name: _wish(c.name, shardings[c.name]) for c in self._configs}
        self.engine = kind([self._table(c) for c in self._configs], env.process_group, options, wishes)
        self.names = {name: name for names in get_embedding_names_by_table(self._configs) for name in names}
        tracks = any(ids._track_removed for ids in modules.values())
        self._changes = self.engine.track_changes() if tracks else None
        self._load_module(module)

    @staticmethod
    def _optimizer_options(tables: nn.Module, fused_params: Mapping[str, Any] | None):
        if fused_params:
            return _to_options(fused_params)
        own = tables.fused_optimizer()
        if own is None:
            raise ValueError(
                "collision.sharded: rows of growing tables are stepped in backward. Give the sharder "
                'fused_params, such as {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.1}.'
            )
        return own.options

    def _table(self, config) -> _C.collision.GrowingTable:
        ids = self._modules[config.name]
        table = _engine.GrowingTable()
        table.config = _config_to_engine(config)
        table.set_bounds(config.weight_init_min, config.weight_init_max)
        table.ids = ids._table_options()
        table.unknown = getattr(_engine.UnknownIds, _UNKNOWN[ids._default])
        table.seed = ids._row_seed & (2**64 - 1)
        return table

    def _load_module(self, module: nn.Module) -> None:
        """Begin with what the collection has: its ids, and rank 0's row of ids without one."""
        state = dict(module.state_dict())
        for config in self._configs:
            weight = state[self._weight_key("", config.name)].clone()
            first = weight[:1].contiguous()
            if self._env.world_size > 1:
                _C.broadcast_(first, 0, self._env.process_group)
            weight[:1] = first
            state[self._weight_key("", config.name)] = weight
            for name, is_per_row in self._kept.items():  # as rows begin, if the collection steps none
                shape = weight.shape[:1] if is_per_row else weight.shape
                state.setdefault(f"_tessera_optimizer.{config.name}.{name}", torch.zeros(shape))
        self.take_state(state, "")

    # ---- one batch ----

    def input_dist(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[list]]:
        """Start sending the ids to their owners. Collective."""
        return start_input_dists([(self.engine, features)], self._env.process_group)

    def compute(self, dist_input: list, is_training: bool) -> list:
        """Admit, evict and look up; the rows start on their way home. Collective."""
        self.engine.set_training(is_training)
        return [self.engine.compute_and_output_dist(dist_input[0])]

    def take_removed_ids(self, table: str) -> torch.Tensor:
        """Return the ids that lost their row on this rank since the last call."""
        self._modules[table].check_tracks_removed()
        return self._changes.take_removed_ids(table)

    # ---- state ----

    def _ids_key(self, prefix: str, table: str, name: str) -> str:
        return f"{prefix}_managed_collision_collection._managed_collision_modules.{table}.{name}"

    def _weight_key(self, prefix: str, table: str) -> str:
        return f"{prefix}_embedding_module.{self._children}.{table}.weight"

    def _gathered(self, value: torch.Tensor) -> torch.Tensor:
        if self._env.world_size == 1:
            return value
        return _C.all_gather_v(value.contiguous(), self._env.process_group, None)

    def put_state(self, state: dict[str, Any], prefix: str) -> None:
        """Add the whole tables. Collective."""
        calls = torch.tensor([self.engine.num_calls()])
        for config in self._configs:
            rows = self.engine.export_rows(config.name)
            for name in _LISTS:
                state[self._ids_key(prefix, config.name, f"_{name}")] = self._gathered(rows[name])
            state[self._ids_key(prefix, config.name, "_current_iter_tensor")] = calls.clone()
            key = self._ids_key(prefix, config.name, "_extra_state")
            state[key] = self._modules[config.name].get_extra_state()
            unknown = self.engine.unknown_row(config.name)
            first = torch.zeros(config.embedding_dim) if unknown is None else unknown
            weight = self._gathered(rows["weight"])
            state[self._weight_key(prefix, config.name)] = torch.cat([first[None].to(weight.dtype), weight])
            held = self.engine.unknown_state(config.name)
            for name, is_per_row in self._kept.items():
                own = rows["state"].get(name)
                if own is None:  # this rank has no part of the table
                    own = torch.empty(0) if is_per_row else torch.empty(0, config.embedding_dim)
                whole = self._gathered(own)
                start = held.get(name, torch.zeros(1, *whole.shape[1:]))
                state[f"{prefix}_tessera_optimizer.{config.name}.{name}"] = torch.cat([start, whole])
        steps = torch.tensor(list(self.engine.num_steps()))
        state[f"{prefix}_tessera_optimizer.steps"] = self._gathered(steps[None]).amax(0)

    def take_state(self, state: dict[str, Any], prefix: str) -> None:
        """Take the rows of this rank's buckets out of whole tables; what was taken is removed. Collective.

        What one rank's state or memory lacks is the same ValueError on all, and no table has changed.
        """
        self._raise_together(self._problem_of(state, prefix))
        self._raise_together(self._prepare_rows(state, prefix))
        self.engine.take_prepared_rows()
        calls, steps = 0, state.pop(f"{prefix}_tessera_optimizer.steps", None)
        one = state.pop(f"{prefix}_tessera_optimizer.step", None)  # of a collection on one rank
        for config in self._configs:
            extra = state.pop(self._ids_key(prefix, config.name, "_extra_state"))
            self._modules[config.name].set_extra_state(extra)
            for name in _LISTS:
                state.pop(self._ids_key(prefix, config.name, f"_{name}"))
            calls = int(state.pop(self._ids_key(prefix, config.name, "_current_iter_tensor")))
            weight = state.pop(self._weight_key(prefix, config.name))
            start = f"{prefix}_tessera_optimizer.{config.name}."
            held = {key: state.pop(key) for key in list(state) if key.startswith(start)}
            unknown = self.engine.unknown_row(config.name)
            if unknown is not None:
                unknown.copy_(weight[0])
                for name, value in self.engine.unknown_state(config.name).items():
                    value.copy_(held[start + name][:1])
        of_rows, of_unknown = (0, 0) if steps is None else steps.tolist()
        if one is not None:
            of_rows = of_unknown = int(one)
        self.engine.set_progress(calls, of_rows, of_unknown)

    def _prepare_rows(self, state: dict[str, Any], prefix: str) -> str:
        """Get memory for this rank's rows of all tables; return what is wrong, and nothing has changed."""
        tables = {}
        try:
            for config in self._configs:
                rows = {name: state[self._ids_key(prefix, config.name, f"_{name}")] for name in _LISTS}
                rows["weight"] = state[self._weight_key(prefix, config.name)][1:].to(torch.float32)
                start = f"{prefix}_tessera_optimizer.{config.name}."
                held = {key: value for key, value in state.items() if key.startswith(start)}
                rows["state"] = {key.removeprefix(start): value[1:] for key, value in held.items()}
                tables[config.name] = rows
            self.engine.prepare_rows(tables)
        except (ValueError, MemoryError, RuntimeError) as error:
            return str(error)
        return ""

    def _problem_of(self, state: dict[str, Any], prefix: str) -> str:
        """Return what is wrong with a state; nothing has changed."""
        try:
            self._check_state(state, prefix)
        except (ValueError, MemoryError, RuntimeError) as error:  # as in _prepare_rows
            return str(error)
        finally:
            for ids in self._modules.values():
                ids.forget_prepared()
        return ""

    def _check_state(self, state: dict[str, Any], prefix: str) -> None:
        modules = f"{prefix}_managed_collision_collection._managed_collision_modules."
        for config in self._configs:
            ids = self._modules[config.name]
            count = ids.prepare_state(state, f"{modules}{config.name}.")
            ids.forget_prepared()  # every rank numbers its own
            shapes: dict[str, tuple[int, ...]] = {}
            if count is not None:
                shapes[self._weight_key(prefix, config.name)] = (count + 1, config.embedding_dim)
                for name, is_per_row in self._kept.items():
                    rest = () if is_per_row else (config.embedding_dim,)
                    shapes[f"{prefix}_tessera_optimizer.{config.name}.{name}"] = (count + 1, *rest)
            missing = next((name for name in shapes if name not in state), None)
            if count is None or missing is not None:
                missing = missing or f"{modules}{config.name}._ids"
                raise ValueError(
                    f"collision.growing: the state of table '{config.name}' has no '{missing}'. Load all "
                    "that was saved of it."
                )
            for name, shape in shapes.items():
                given = tuple(state[name].shape)
                if given != shape:
                    raise ValueError(
                        f"collision.growing: '{name}' has the shape {given}; for {count} ids of table "
                        f"'{config.name}' it must be {shape}. Load all that was saved of it, into a table of "
                        "as many columns and with the same optimizer."
                    )

    def _raise_together(self, problem: str) -> None:
        group = self._env.process_group
        if self._env.world_size > 1:
            flags = _C.all_gather_v(torch.tensor([int(bool(problem))]), group, None)
            wrong = flags.nonzero().flatten().tolist()
            if wrong:
                text = _C.broadcast_bytes(problem.encode(), wrong[0], group).decode()
                problem = f"{text} (on rank {wrong[0]})"
        if problem:
            self.engine.forget_prepared_rows()
            raise ValueError(problem)
