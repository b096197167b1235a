"""The planner: tables of a model, constraints and ranks in; a plan and its proof out."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera import _C
from tessera.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from tessera.distributed.comm import get_local_size
from tessera.distributed.planner.constants import BATCH_SIZE
from tessera.distributed.planner.stats import EmbeddingStats
from tessera.distributed.planner.storage_reservations import HeuristicalStorageReservation
from tessera.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    PartitionByType,
    Partitioner,
    Perf,
    PerfModel,
    PlannerError,
    PlannerErrorType,
    Proposer,
    Shard,
    ShardingOption,
    Stats,
    Storage,
    StorageReservation,
    Topology,
)
from tessera.distributed.sharding_plan import _steps_in_backward, get_default_sharders, plan_from_json
from tessera.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
    ShardingPlanner,
)

__all__ = ["EmbeddingPlannerBase", "EmbeddingShardingPlanner", "PlanResult", "default_planner"]

logger = logging.getLogger(__name__)

_ERRORS = {
    "too_large": PlannerErrorType.INSUFFICIENT_STORAGE,
    "rules": PlannerErrorType.STRICT_CONSTRAINTS,
    "bad_problem": PlannerErrorType.INPUT_VALIDATION,
    "bad_evidence": PlannerErrorType.OTHER,
}
# Bytes of optimizer state a row and a number, by the name of the rule.
_STATES = {
    "sgd": (0, 0),
    "exact_sgd": (0, 0),
    "rowwiseadagrad": (4, 0),
    "exact_row_wise_adagrad": (4, 0),
    "adagrad": (0, 4),
    "exact_adagrad": (0, 4),
    "larssgd": (0, 4),
    "lars_sgd": (0, 4),
    "partialrowwiseadam": (4, 4),
    "partial_row_wise_adam": (4, 4),
    "partialrowwiselamb": (4, 4),
    "partial_row_wise_lamb": (4, 4),
    "adam": (0, 8),
    "adamw": (0, 8),
    "lamb": (0, 8),
}
_PARTITIONS = {
    "table_wise": PartitionByType.DEVICE,
    "column_wise": PartitionByType.DEVICE,
    "table_row_wise": PartitionByType.HOST,
    "table_column_wise": PartitionByType.HOST,
    "row_wise": PartitionByType.UNIFORM,
    "data_parallel": PartitionByType.UNIFORM,
    "grid_shard": PartitionByType.MULTI_HOST,
}


@dataclass
class PlanResult:
    """Tell how good a plan is: its step, what no plan can be under, and the proof, as the engine wrote it."""

    plan_seconds: float
    bound_seconds: float
    gap: float
    certificate: dict[str, Any]
    problem: str
    json: str

    def explain(self, table: str = "") -> str:
        """Return why a table ("path.name") lies where it does, or a table of all."""
        kind, text = _C.planner.text(self.problem, table)
        if kind:
            raise PlannerError(text, _ERRORS[kind])
        return text

    def check(self) -> None:
        """Raise PlannerError unless the plan fits and the proof holds."""
        kind, text = _C.planner.check(self.problem, self.json)
        if kind:
            raise PlannerError(text, _ERRORS[kind])


@dataclass
class _Table:
    path: str
    name: str
    module: nn.Module
    sharder: ModuleSharder[nn.Module]
    tensor: torch.Tensor
    config: Any
    is_weighted: bool
    is_pooled: bool

    @property
    def key(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def _configs_of(module: nn.Module) -> tuple[list[Any], bool, bool]:
    """Return the tables' configurations, whether ids have weights, and whether bags are pooled."""
    for part in module.modules():
        if hasattr(part, "embedding_bag_configs"):
            return part.embedding_bag_configs(), bool(part.is_weighted()), True
        if hasattr(part, "embedding_configs"):
            return part.embedding_configs(), False, False
    return [], False, True


def _tables_of(module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> Iterator[_Table]:
    kinds = {sharder.module_type: sharder for sharder in sharders}

    def walk(part: nn.Module, path: str) -> Iterator[_Table]:
        sharder = kinds.get(type(part))
        if sharder is None:
            for name, child in part.named_children():
                yield from walk(child, f"{path}.{name}" if path else name)
            return
        configs, is_weighted, is_pooled = _configs_of(part)
        by_name = {config.name: config for config in configs}
        for name, tensor in sharder.shardable_parameters(part).items():
            yield _Table(path, name, part, sharder, tensor, by_name.get(name), is_weighted, is_pooled)

    yield from walk(module, "")


def _state_of(table: _Table) -> tuple[float, float]:
    classes = getattr(table.tensor, "_optimizer_classes", None)
    name = classes[0].__name__ if classes else None
    if name is None:
        optimizer = (getattr(table.sharder, "fused_params", None) or {}).get("optimizer")
        name = getattr(optimizer, "value", None) or "rowwiseadagrad"
    return _STATES.get(str(name).lower(), (0, 8))


class EmbeddingPlannerBase(ShardingPlanner):
    """Hold what planners are given."""

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
    ) -> None:
        if topology is None:
            is_joined = dist.is_available() and dist.is_initialized()
            world_size = dist.get_world_size() if is_joined else 1
            topology = Topology(
                world_size=world_size,
                compute_device="cuda" if torch.cuda.is_available() else "cpu",
                local_world_size=get_local_size(world_size),
            )
        self._topology = topology
        self._batch_size = batch_size or BATCH_SIZE
        self._constraints = constraints
        self._enumerator = enumerator
        self._storage_reservation = storage_reservation or HeuristicalStorageReservation(percentage=0.15)
        self._stats = stats if isinstance(stats, list) else [stats or EmbeddingStats()]
        self._debug = debug
        self._callbacks = callbacks or []
        self._timeout_seconds = timeout_seconds

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Return rank 0's plan on all ranks. Collective.

        What the ranks were given is compared first: a rank that was given something else is the same
        PlannerError on all of them.
        """
        if pg is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise ValueError(
                    "collective_plan: there is no process group. Call torch.distributed.init_process_group "
                    "first, or plan(), which needs none."
                )
            pg = dist.group.WORLD
        sharders = get_default_sharders() if sharders is None else sharders
        self._check_agreement(module, sharders, pg)
        return invoke_on_rank_and_broadcast_result(pg, 0, self.plan, module, sharders)

    def _inputs(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> dict[str, str]:
        raise NotImplementedError

    def _check_agreement(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], pg: dist.ProcessGroup
    ) -> None:
        own = {
            part: hashlib.sha256(text.encode()).hexdigest()
            for part, text in self._inputs(module, sharders).items()
        }
        given: list[Any] = [None] * pg.size()
        dist.all_gather_object(given, own, group=pg)
        for rank, other in enumerate(given):
            parts = [part for part in given[0] if other.get(part) != given[0][part]]
            if parts:
                raise PlannerError(
                    f"collective_plan: rank {rank} was given other {' and '.join(parts)} than rank 0. "
                    "Give all ranks the same.",
                    PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
                )


class EmbeddingShardingPlanner(EmbeddingPlannerBase):
    """Find a plan, and prove how far it is at most from the best one.

    Constraints are by the name of the table. With a proposer, partitioner or performance model of one's
    own, proposals are placed and rated by those, and there is no proof.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: Any = None,
        *,
        objective: str = "sum",
        effort: str = "normal",
    ) -> None:
        super().__init__(
            topology, batch_size, enumerator, storage_reservation, stats, constraints, debug, callbacks,
            timeout_seconds,
        )  # fmt: skip
        parts = {"proposer": proposer, "partitioner": partitioner, "performance_model": performance_model,
                 "enumerator": enumerator, "plan_loader": plan_loader}  # fmt: skip
        given = [name for name, part in parts.items() if part is not None]
        if given:
            raise NotImplementedError(
                f"EmbeddingShardingPlanner: {' and '.join(given)} of one's own are not supported yet. "
                "Leave them out: the planner then proves how good its plan is."
            )
        efforts = {"low": 8, "normal": 64, "high": 4096}
        if objective not in ("sum", "phases") or effort not in efforts:
            raise ValueError(
                f"EmbeddingShardingPlanner: objective is {objective!r}, not sum or phases, or effort is "
                f"{effort!r}, not low, normal or high."
            )
        self._objective, self._tries = objective, efforts[effort]
        self.last_result: PlanResult | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]] | None = None) -> ShardingPlan:
        """Return a plan for all tables that the sharders take. Not collective."""
        begin = time.perf_counter()
        sharders = get_default_sharders() if sharders is None else sharders
        tables = list(_tables_of(module, sharders))
        if not tables:
            return ShardingPlan({})
        problem = json.dumps(self._problem(module, sharders, tables))
        kind, text = _C.planner.plan(problem)
        if kind:
            raise PlannerError(text, _ERRORS[kind])
        result = json.loads(text)
        keep = ("plan_seconds", "bound_seconds", "gap", "certificate")
        self.last_result = PlanResult(**{key: result[key] for key in keep}, problem=problem, json=text)
        options = self._options(tables, result, problem)
        for callback in self._callbacks:
            options = callback(options)
        plan = self._sharding_plan(options)
        if self._debug:
            for stats in self._stats:
                stats.log(
                    sharding_plan=plan,
                    topology=self._topology,
                    batch_size=self._batch_size,
                    storage_reservation=self._storage_reservation,
                    num_proposals=result["tries"],
                    num_plans=1,
                    run_time=time.perf_counter() - begin,
                    best_plan=options,
                    constraints=self._constraints,
                    sharders=sharders,
                    enumerator=self._enumerator,
                    debug=self._debug,
                )
        return plan

    def _inputs(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> dict[str, str]:
        problem = self._problem(module, sharders, list(_tables_of(module, sharders)))
        return {
            "tables": json.dumps(problem["tables"]),
            "constraints": json.dumps(problem["rules"]),
            "topology": json.dumps([problem["ranks"], problem["ranks_per_host"]]),
            "batch size": json.dumps(problem["batch"]),
            "options": json.dumps([problem["objective"], problem["tries"]]),
        }

    def _problem(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], tables: list[_Table]
    ) -> dict[str, Any]:
        topology, constraints = self._topology, self._constraints or {}
        unknown = set(constraints) - {table.name for table in tables} - {table.key for table in tables}
        if unknown:
            raise PlannerError(
                f"plan: there are constraints for {', '.join(sorted(unknown))}, and no such table.",
                PlannerErrorType.INPUT_VALIDATION,
            )
        left = self._storage_reservation.reserve(
            topology, self._batch_size, module, sharders, self._constraints
        )
        on_device = topology.compute_device != "cpu"
        speeds = {
            "memory_speed": 1000 * (topology.hbm_mem_bw if on_device else topology.ddr_mem_bw),
            "host_speed": 1000 * topology.intra_host_bw,
            "network_speed": 1000 * topology.inter_host_bw,
        }
        listed, rules = [], {}
        for table in tables:
            own = constraints.get(table.key) or constraints.get(table.name) or ParameterConstraints()
            listed.append(self._listed(table, own))
            rules[table.key] = self._rules(table, own)
        return {
            "tables": listed,
            "rules": rules,
            "batch": self._batch_size,
            "ranks": [
                {"memory": device.storage.hbm if on_device else device.storage.ddr, **speeds}
                for device in left.devices
            ],
            "ranks_per_host": topology.local_world_size,
            "reserved_percent": 0,
            "objective": self._objective,
            "tries": self._tries,
        }

    def _listed(self, table: _Table, own: ParameterConstraints) -> dict[str, Any]:
        names = own.feature_names or getattr(table.config, "feature_names", None) or [table.name]

        def per_feature(values: list[Any] | None, default: float) -> list[float]:
            values = list(values or [default])
            if len(values) not in (1, len(names)):
                raise PlannerError(
                    f"plan: table {table.name!r} has {len(names)} features, and its constraints have "
                    f"{len(values)} numbers.",
                    PlannerErrorType.INPUT_VALIDATION,
                )
            return [float(value) for value in (values * len(names) if len(values) == 1 else values)]

        # Features with batches or poolings of their own look up so much more.
        ids = per_feature(own.pooling_factors, 1.0)
        poolings = per_feature(own.num_poolings, 1.0)
        batches = per_feature(own.batch_sizes, float(self._batch_size))
        lookups = [i * n * b / self._batch_size for i, n, b in zip(ids, poolings, batches, strict=True)]
        per_row, per_element = _state_of(table)
        is_stepped = bool(own.compute_kernels) or _steps_in_backward(table.tensor, table.sharder)
        if not is_stepped or set(own.compute_kernels or ()) == {"dense"}:
            per_element += 4  # the gradient
        weighted = table.is_weighted or own.is_weighted
        return {
            "name": table.key,
            "rows": table.tensor.shape[0],
            "dim": table.tensor.shape[1],
            "element_bytes": table.tensor.element_size(),
            "pooled": table.is_pooled,
            "features": [{"ids": lookup, "weighted": weighted} for lookup in lookups],
            "state_bytes_per_row": per_row,
            "state_bytes_per_element": per_element,
        }

    def _rules(self, table: _Table, own: ParameterConstraints) -> dict[str, Any]:
        device = self._topology.compute_device
        if own.device_group is not None and own.device_group != device:
            raise PlannerError(
                f"plan: table {table.name!r} may lie on {own.device_group} only; the ranks have {device}.",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
        if own.key_value_params is not None or own.use_virtual_table or own.cache_params is not None:
            warnings.warn(
                f"plan: caches and virtual tables are not priced; {table.name!r} is planned as if all of its "
                "rows were in memory.",
                stacklevel=4,
            )
        offered = table.sharder.sharding_types(device)
        cuts = [cut for cut in offered if not own.sharding_types or cut in own.sharding_types]
        kernels = {kernel for cut in cuts for kernel in table.sharder.compute_kernels(cut, device)}
        if own.compute_kernels:
            kernels = {kernel for kernel in own.compute_kernels if kernel in kernels or "uvm" in kernel}
        if "data_parallel" in cuts and not own.sharding_types and "fused" in kernels:
            # Its gradients would be somebody else's to step; only whoever asks for it gets it.
            cuts.remove("data_parallel")
        if not cuts or not kernels:
            raise PlannerError(
                f"plan: table {table.name!r} may be {own.sharding_types} with kernels {own.compute_kernels}, "
                f"and its sharder offers {offered} on {device}.",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
        engine = sorted({"dense" if kernel == "dense" else "fused" for kernel in kernels})
        if engine == ["dense"] and cuts != ["data_parallel"]:
            engine = ["dense", "fused"]  # shards with gradients of their own are priced as fused ones
        rules: dict[str, Any] = {"cuts": cuts, "kernels": engine}
        if own.min_partition:
            rules["min_columns"] = own.min_partition
        return rules

    def _options(self, tables: list[_Table], result: dict[str, Any], problem: str) -> list[ShardingOption]:
        by_key = {table.key: table for table in tables}
        costs = _C.planner.shard_costs(
            problem,
            [
                (one["name"], one["type"], one["kernel"], [(s[2], s[3], s[4]) for s in one["shards"]])
                for one in result["tables"]
            ],
        )
        on_device = self._topology.compute_device != "cpu"
        constraints = self._constraints or {}
        options = []
        for one, numbers in zip(result["tables"], costs, strict=True):
            table = by_key[one["name"]]
            own = constraints.get(table.key) or constraints.get(table.name) or ParameterConstraints()
            shards = []
            for (row, column, rows, columns, rank), cost in zip(one["shards"], numbers, strict=True):
                ids, lookup, out, grads, step, held = cost
                perf = Perf(1e3 * lookup, 1e3 * out, 1e3 * step, 1e3 * grads, 0.0, 1e3 * ids)
                storage = Storage(int(held), 0) if on_device else Storage(0, int(held))
                shards.append(Shard([rows, columns], [row, column], storage, perf, rank))
            # Without an optimizer for backward its rows are the user's own to step, as in plans made by hand.
            is_stepped = _steps_in_backward(table.tensor, table.sharder)
            asked = own.compute_kernels or [one["kernel"] if is_stepped else "dense"]
            named = [k for k in asked if (k == "dense") == (one["kernel"] == "dense")] or asked
            options.append(
                ShardingOption(
                    name=table.name,
                    tensor=table.tensor,
                    module=(table.path, table.module),
                    input_lengths=list(own.pooling_factors),
                    batch_size=self._batch_size,
                    sharding_type=one["type"],
                    partition_by=_PARTITIONS[one["type"]].value,
                    compute_kernel=named[0],
                    shards=shards,
                    cache_params=own.cache_params,
                    enforce_hbm=own.enforce_hbm,
                    stochastic_rounding=own.stochastic_rounding,
                    bounds_check_mode=own.bounds_check_mode,
                    is_pooled=table.is_pooled,
                    feature_names=own.feature_names,
                    output_dtype=own.output_dtype,
                    key_value_params=own.key_value_params,
                    num_poolings=own.num_poolings,
                )
            )
        return options

    def _sharding_plan(self, options: list[ShardingOption]) -> ShardingPlan:
        modules: dict[str, dict[str, Any]] = {}
        for option in options:
            modules.setdefault(option.path, {})[option.name] = {
                "type": option.sharding_type,
                "kernel": "dense" if option.compute_kernel == "dense" else "fused",
                "ranks": [shard.rank for shard in option.shards],
                "shards": [[*shard.offset, *shard.size, shard.rank] for shard in option.shards],
            }
        topology = self._topology
        plan = plan_from_json(
            json.dumps({"version": 1, "modules": modules}), topology.compute_device, topology.local_world_size
        )
        for option in options:
            tables = plan.plan[option.path]
            assert isinstance(tables, EmbeddingModuleShardingPlan)
            sharding = tables[option.name]
            sharding.compute_kernel = option.compute_kernel
            sharding.cache_params = option.cache_params
            sharding.enforce_hbm = option.enforce_hbm
            sharding.stochastic_rounding = option.stochastic_rounding
            sharding.bounds_check_mode = option.bounds_check_mode
        return plan


def default_planner(world_size: int, local_size: int, device: torch.device) -> EmbeddingShardingPlanner:
    """Return the planner of a model without a plan: this machine's memory, and assumed speeds.

    Ranks that have different memory plan for different machines, and hear of it in `collective_plan`; so
    memory is counted in whole GiB.
    """
    if device.type == "cuda":
        memory = {"hbm_cap": torch.cuda.get_device_properties(device).total_memory // 1024**3 * 1024**3}
        speeds: dict[str, float] = {}
    else:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = {"ddr_cap": max(1, pages // local_size // 1024**3) * 1024**3}
        speeds = {"ddr_mem_bw": 51e6, "intra_host_bw": 25e6, "inter_host_bw": 12.5e6}
    logger.info(
        "DistributedModelParallel: no plan was given; speeds of this machine are assumed, not measured"
    )
    topology = Topology(
        world_size=world_size,
        compute_device="cuda" if device.type == "cuda" else "cpu",
        local_world_size=local_size,
        **memory,
        **speeds,
    )
    return EmbeddingShardingPlanner(topology=topology, debug=False)
