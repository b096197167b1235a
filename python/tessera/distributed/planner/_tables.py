"""Tables of a model as the engine is told of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tessera.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from tessera.distributed.planner.utils import sharder_name
from tessera.distributed.sharding_plan import _steps_in_backward
from tessera.distributed.types import ModuleSharder

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


@dataclass
class PlannedTable:
    """Hold what is known of one table before it is cut."""

    path: str
    name: str
    module: nn.Module
    sharder: ModuleSharder[nn.Module] | None
    tensor: torch.Tensor
    config: Any
    is_weighted: bool
    is_pooled: bool

    @property
    def key(self) -> str:
        """Return the name that the engine knows it by."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def offered_types(self, device: str) -> list[str]:
        """Return the types of sharding that the sharder knows for this module."""
        assert self.sharder is not None
        narrow = getattr(self.sharder, "_types_for", None)
        return self.sharder.sharding_types(device) if narrow is None else narrow(self.module, device)


def _configs_of(module: nn.Module) -> tuple[dict[str, Any], bool, bool]:
    """Return the tables' configurations, whether ids have weights, and whether bags are pooled."""
    for part in module.modules():
        if hasattr(part, "embedding_bag_configs"):
            named = {config.name: config for config in part.embedding_bag_configs()}
            return named, bool(part.is_weighted()), True
    # What maps ids has such configurations too, whether bags are pooled behind it or not.
    for part in module.modules():
        if hasattr(part, "embedding_configs"):
            return {config.name: config for config in part.embedding_configs()}, False, False
    return {}, False, True


def tables_of(module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> Iterator[PlannedTable]:
    """Yield the tables that the sharders take, in the order of the modules."""
    kinds = {sharder.module_type: sharder for sharder in sharders}

    def walk(part: nn.Module, path: str) -> Iterator[PlannedTable]:
        sharder = kinds.get(type(part))
        if sharder is None:
            for name, child in part.named_children():
                yield from walk(child, f"{path}.{name}" if path else name)
            return
        configs, is_weighted, is_pooled = _configs_of(part)
        for name, tensor in sharder.shardable_parameters(part).items():
            yield PlannedTable(path, name, part, sharder, tensor, configs.get(name), is_weighted, is_pooled)

    yield from walk(module, "")


def tables_of_options(
    options: list[ShardingOption], sharder_map: Mapping[str, ModuleSharder[nn.Module]] | None
) -> list[PlannedTable]:
    """Return the tables that options are about, each once, in their order."""
    found: dict[str, PlannedTable] = {}
    seen: dict[int, tuple[dict[str, Any], bool, bool]] = {}
    for option in options:
        if option.fqn in found:
            continue
        path, module = option.module
        configs, is_weighted, _ = seen.setdefault(id(module), _configs_of(module))
        sharder = (sharder_map or {}).get(sharder_name(type(module)))
        found[option.fqn] = PlannedTable(
            path, option.name, module, sharder, option.tensor, configs.get(option.name), is_weighted,
            option.is_pooled,
        )  # fmt: skip
    return list(found.values())


def constraints_of(
    table: PlannedTable, constraints: Mapping[str, ParameterConstraints] | None
) -> ParameterConstraints:
    """Return what is asked of a table, by its path or its name."""
    given = constraints or {}
    return given.get(table.key) or given.get(table.name) or ParameterConstraints()


def _state_of(table: PlannedTable) -> tuple[float, float]:
    classes = getattr(table.tensor, "_optimizer_classes", None)
    name = classes[0].__name__ if classes else None
    if name is None:
        optimizer = (getattr(table.sharder, "fused_params", None) or {}).get("optimizer")
        name = getattr(optimizer, "value", None) or "rowwiseadagrad"
    return _STATES.get(str(name).lower(), (0, 8))


def entry_of(table: PlannedTable, own: ParameterConstraints, batch_size: int) -> dict[str, Any]:
    """Return a table as the engine reads it (docs/planner.md)."""
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
    batches = per_feature(own.batch_sizes, float(batch_size))
    lookups = [i * n * b / batch_size for i, n, b in zip(ids, poolings, batches, strict=True)]
    per_row, per_element = _state_of(table)
    # Ids of columns that are cut lie with the first ones; any part of them may be those.
    per_row += getattr(table.sharder, "_id_bytes_per_row", 0)
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


def rules_of(table: PlannedTable, own: ParameterConstraints, device: str) -> dict[str, Any]:
    """Return the cuts and kernels that constraints and sharder leave a table."""
    if own.device_group is not None and own.device_group != device:
        raise PlannerError(
            f"plan: table {table.name!r} may lie on {own.device_group} only; the ranks have {device}.",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
    if own.key_value_params is not None or own.use_virtual_table or own.cache_params is not None:
        warnings.warn(
            f"plan: caches and virtual tables are not priced; {table.name!r} is planned as if all of its "
            "rows were in memory.",
            stacklevel=5,
        )
    assert table.sharder is not None
    offered = table.offered_types(device)
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


def check_constraints(
    tables: list[PlannedTable], constraints: Mapping[str, ParameterConstraints] | None
) -> None:
    """Raise PlannerError for constraints of tables that are not there."""
    unknown = set(constraints or ()) - {table.name for table in tables} - {table.key for table in tables}
    if unknown:
        raise PlannerError(
            f"plan: there are constraints for {', '.join(sorted(unknown))}, and no such table.",
            PlannerErrorType.INPUT_VALIDATION,
        )


def ranks_of(topology: Topology) -> list[dict[str, float]]:
    """Return the ranks of a topology as the engine reads them: memory for tables, and speeds."""
    on_device = topology.compute_device != "cpu"
    return [
        {"memory": device.storage.hbm if on_device else device.storage.ddr, **topology.speeds(device.rank)}
        for device in topology.devices
    ]
