"""Options as plans, and what must hold of a plan before anybody trains with it."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from tessera.distributed.embedding_types import EmbeddingComputeKernel
from tessera.distributed.planner._tables import tables_of
from tessera.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from tessera.distributed.sharding_plan import plan_from_json
from tessera.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan

_KERNELS = {kernel.value for kernel in EmbeddingComputeKernel}


def to_sharding_plan(sharding_options: list[ShardingOption], topology: Topology) -> ShardingPlan:
    """Return the plan of options whose shards have ranks."""
    modules: dict[str, dict[str, Any]] = {}
    for option in sharding_options:
        if any(shard.rank is None for shard in option.shards):
            raise PlannerError(
                f"plan: a shard of {option.fqn} has no rank; a partitioner has to give it one.",
                PlannerErrorType.INVALID_RANK_ASSIGNMENT,
            )
        modules.setdefault(option.path, {})[option.name] = {
            "type": option.sharding_type,
            "kernel": "dense" if option.compute_kernel == "dense" else "fused",
            "ranks": [shard.rank for shard in option.shards],
            "shards": [[*shard.offset, *shard.size, shard.rank] for shard in option.shards],
        }
    plan = plan_from_json(
        json.dumps({"version": 1, "modules": modules}), topology.compute_device, topology.local_world_size
    )
    for option in sharding_options:
        tables = plan.plan[option.path]
        assert isinstance(tables, EmbeddingModuleShardingPlan)
        sharding = tables[option.name]
        sharding.compute_kernel = option.compute_kernel
        sharding.cache_params = option.cache_params
        sharding.enforce_hbm = option.enforce_hbm
        sharding.stochastic_rounding = option.stochastic_rounding
        sharding.bounds_check_mode = option.bounds_check_mode
    return plan


def extract_plan(
    search_space: list[ShardingOption], loaded_sharding_options: dict[int, ShardingOption]
) -> list[ShardingOption]:
    """Return the options of a plan that was kept, with the tables of now and the shards of then."""
    found: list[ShardingOption] = []
    seen: dict[int, str] = {}
    for option in search_space:
        key = option.storage_hash()
        if key in seen:
            raise PlannerError(
                f"plan: {option.fqn} and {seen[key]} have the same hash.",
                PlannerErrorType.PLAN_LOADING_FAILED,
            )
        seen[key] = option.fqn
        if key in loaded_sharding_options:
            option.shards = loaded_sharding_options[key].shards
            found.append(option)
    missing = [option.fqn for key, option in loaded_sharding_options.items() if key not in seen]
    if missing:
        raise PlannerError(
            f"plan: the plan that was kept has {', '.join(sorted(missing))}, which nothing here can be cut "
            "like.",
            PlannerErrorType.PLAN_LOADING_FAILED,
        )
    return found


def validate_modules_inclusion_in_sharding_plan(
    sharding_plan: ShardingPlan,
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    constraints: dict[str, ParameterConstraints] | None = None,
    device_group: str | None = None,
) -> None:
    """Raise PlannerError unless every table that the sharders take is in the plan.

    With a `device_group` only the tables whose constraints name it.
    """
    if device_group is not None and constraints is None:
        raise ValueError("planner: a device_group needs the constraints that name it.")
    missing = []
    for table in tables_of(module, sharders):
        own = (constraints or {}).get(table.name)
        if device_group is not None and (own is None or own.device_group != device_group):
            continue
        tables = sharding_plan.plan.get(table.path)
        if not isinstance(tables, dict) or table.name not in tables:
            missing.append(table.key)
    if missing:
        raise PlannerError(
            f"plan: {', '.join(missing)} of the model missing in the plan.",
            PlannerErrorType.MISSING_MODULE_IN_PLAN,
        )


def validate_rank_assignment(sharding_plan: ShardingPlan, topology: Topology) -> None:
    """Raise PlannerError unless every shard lies on a rank that is there."""
    for path, tables in sharding_plan.plan.items():
        assert isinstance(tables, EmbeddingModuleShardingPlan)
        for name, sharding in tables.items():
            for shard in getattr(sharding.sharding_spec, "shards", None) or []:
                rank = shard.placement.rank()
                if rank is None or not 0 <= rank < topology.world_size:
                    raise PlannerError(
                        f"plan: {path}.{name} has a shard on rank {rank}; there are {topology.world_size}.",
                        PlannerErrorType.INVALID_RANK_ASSIGNMENT,
                    )


def validate_compute_kernels(best_plan: list[ShardingOption]) -> None:
    """Raise PlannerError for kernels that are none, impossible cache sizes and less than no memory."""
    wrong = []
    for option in best_plan:
        if option.compute_kernel not in _KERNELS:
            wrong.append(f"{option.fqn} has the kernel {option.compute_kernel!r}, which is none")
            continue
        factor = option.cache_load_factor
        if "caching" in option.compute_kernel and factor is not None and not 0 < factor < 1:
            wrong.append(f"the cache of {option.fqn} is {factor} of the table, not between 0 and 1")
        if min(option.total_storage.hbm, option.total_storage.ddr) < 0:
            wrong.append(f"{option.fqn} takes {option.total_storage}, less than nothing")
    if wrong:
        raise PlannerError("plan: " + "; ".join(wrong) + ".", PlannerErrorType.INVALID_COMPUTE_KERNEL)
