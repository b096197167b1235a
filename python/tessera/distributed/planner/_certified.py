"""Plans of the engine: the problem it is given, and its answer as sharding options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tessera import _C
from tessera.distributed.planner._tables import (
    PlannedTable,
    check_constraints,
    constraints_of,
    entry_of,
    ranks_of,
    rules_of,
)
from tessera.distributed.planner.enumerators import get_partition_by_type
from tessera.distributed.planner.shard_estimators import perf_and_storage
from tessera.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Topology,
)
from tessera.distributed.sharding_plan import _steps_in_backward

ERRORS = {
    "too_large": PlannerErrorType.INSUFFICIENT_STORAGE,
    "rules": PlannerErrorType.STRICT_CONSTRAINTS,
    "bad_problem": PlannerErrorType.INPUT_VALIDATION,
    "bad_evidence": PlannerErrorType.OTHER,
    "late": PlannerErrorType.OTHER,
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
    is_cut_short: bool = False  # the best so far when the time was over

    def explain(self, table: str = "") -> str:
        """Return why a table ("path.name") lies where it does, or a table of all."""
        kind, text = _C.planner.text(self.problem, self.json, table)
        if kind:
            raise PlannerError(text, ERRORS[kind])
        return text

    def check(self) -> None:
        """Raise PlannerError unless the plan fits and the proof holds."""
        kind, text = _C.planner.check(self.problem, self.json)
        if kind:
            raise PlannerError(text, ERRORS[kind])


def problem_of(
    tables: list[PlannedTable],
    constraints: Mapping[str, ParameterConstraints] | None,
    left: Topology,
    batch_size: int,
    objective: str = "sum",
    tries: int = 64,
) -> dict[str, Any]:
    """Return what the engine is asked; `left` has the memory after the reservation."""
    check_constraints(tables, constraints)
    listed, rules = [], {}
    for table in tables:
        own = constraints_of(table, constraints)
        listed.append(entry_of(table, own, batch_size))
        rules[table.key] = rules_of(table, own, left.compute_device)
    return {
        "tables": listed,
        "rules": rules,
        "batch": batch_size,
        "ranks": ranks_of(left),
        "ranks_per_host": left.local_world_size,
        "reserved_percent": 0,
        "objective": objective,
        "tries": tries,
    }


def lists_of(tables: list[PlannedTable], lists: Mapping[str, list[list[str]]]) -> dict[str, list[list[str]]]:
    """Return the lists of tables that lie apart or together, by the engine's names of them."""
    keys: dict[str, list[str]] = {}
    for table in tables:
        for name in {table.name, table.key}:
            keys.setdefault(name, []).append(table.key)
    found: dict[str, list[list[str]]] = {}
    for rule, every in lists.items():
        for names in every:
            unknown = [name for name in names if name not in keys]
            if unknown:
                raise PlannerError(
                    f"plan: {rule} names {unknown[0]!r}, which is no table.",
                    PlannerErrorType.INPUT_VALIDATION,
                )
            found.setdefault(rule, []).append([key for name in names for key in keys[name]])
    return found


def solve(problem: dict[str, Any], seconds: float = 0) -> tuple[dict[str, Any], PlanResult]:
    """Return the engine's plan, as JSON read and with its proof, after so many seconds the best so far.

    Raises PlannerError.
    """
    asked = json.dumps(problem)
    kind, text = _C.planner.plan(asked, seconds)
    if kind:
        raise PlannerError(text, ERRORS[kind])
    result = json.loads(text)
    keep = ("plan_seconds", "bound_seconds", "gap", "certificate")
    cut = result.get("cut_short", False)
    return result, PlanResult(
        **{key: result[key] for key in keep}, problem=asked, json=text, is_cut_short=cut
    )


def options_of(
    tables: list[PlannedTable],
    result: dict[str, Any],
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology,
    batch_size: int,
) -> list[ShardingOption]:
    """Return the engine's plan as one option a table, with ranks and costs."""
    by_key = {table.key: table for table in tables}
    options = []
    for one in result["tables"]:
        table = by_key[one["name"]]
        own = constraints_of(table, constraints)
        # Without an optimizer for backward its rows are the user's own to step, as in plans made by hand.
        is_stepped = _steps_in_backward(table.tensor, table.sharder)
        asked = own.compute_kernels or [one["kernel"] if is_stepped else "dense"]
        named = [k for k in asked if (k == "dense") == (one["kernel"] == "dense")] or asked
        option = ShardingOption(
            name=table.name,
            tensor=table.tensor,
            module=(table.path, table.module),
            input_lengths=list(own.pooling_factors),
            batch_size=batch_size,
            sharding_type=one["type"],
            partition_by=get_partition_by_type(one["type"]),
            compute_kernel=named[0],
            shards=[
                Shard([rows, columns], [row, column], rank=rank)
                for row, column, rows, columns, rank in one["shards"]
            ],
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
        options.append(option)
    kernels = [one["kernel"] for one in result["tables"]]
    for option, costs in zip(
        options, perf_and_storage(options, tables, constraints, topology, kernels), strict=True
    ):
        for shard, (perf, storage) in zip(option.shards, costs, strict=True):
            shard.perf, shard.storage = perf, storage
    return options
