"""All ways to cut the tables of a model, equal parts only, with their costs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import torch
from torch import nn

from tessera.distributed.planner._tables import tables_of
from tessera.distributed.planner.constants import MIN_CW_DIM
from tessera.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from tessera.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    PartitionByType,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from tessera.distributed.planner.utils import sharder_name
from tessera.distributed.types import ModuleSharder

__all__ = ["EmbeddingEnumerator", "calculate_shard_sizes_and_offsets", "get_partition_by_type"]

logger = logging.getLogger(__name__)

_PARTITIONS = {
    "table_wise": PartitionByType.DEVICE,
    "column_wise": PartitionByType.DEVICE,
    "table_row_wise": PartitionByType.HOST,
    "table_column_wise": PartitionByType.HOST,
    "row_wise": PartitionByType.UNIFORM,
    "data_parallel": PartitionByType.UNIFORM,
    "grid_shard": PartitionByType.MULTI_HOST,
}


def get_partition_by_type(sharding_type: str) -> str:
    """Return where the shards of a type of sharding may lie.

    >>> get_partition_by_type("row_wise")
    'uniform'
    """
    if sharding_type not in _PARTITIONS:
        raise ValueError(f"planner: {sharding_type!r} is not one of {', '.join(_PARTITIONS)}.")
    return _PARTITIONS[sharding_type].value


def _cut_rows(rows: int, count: int, columns: int, column: int = 0) -> list[tuple[list[int], list[int]]]:
    height = -(-rows // count)
    begins = [min(i * height, rows) for i in range(count)]
    return [([min(height, rows - begin), columns], [begin, column]) for begin in begins]


def _widths(columns: int, width: int | None) -> list[int]:
    """Return equal widths of at least `width`, and what is left over in the last."""
    width = min(columns, MIN_CW_DIM if width is None else width)
    return [width] * (columns // width - 1) + [width + columns % width]


def calculate_shard_sizes_and_offsets(
    tensor: torch.Tensor,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sizes of a table's shards, and where they begin.

    >>> calculate_shard_sizes_and_offsets(torch.empty(5, 8), 2, 2, "row_wise")
    ([[3, 8], [2, 8]], [[0, 0], [3, 0]])
    """
    rows, columns = tensor.shape
    shards: list[tuple[list[int], list[int]]] = []
    if sharding_type == "data_parallel":
        shards = [([rows, columns], [0, 0]) for _ in range(world_size)]
    elif sharding_type == "table_wise":
        shards = [([rows, columns], [0, 0])]
    elif sharding_type in ("row_wise", "table_row_wise"):
        shards = _cut_rows(rows, world_size if sharding_type == "row_wise" else local_world_size, columns)
    else:
        get_partition_by_type(sharding_type)  # refuses what is no type
        begin = 0
        for width in _widths(columns, col_wise_shard_dim):
            if sharding_type == "grid_shard":
                shards += _cut_rows(rows, local_world_size, width, begin)
            else:
                shards.append(([rows, width], [0, begin]))
            begin += width
    return [size for size, _ in shards], [offset for _, offset in shards]


class EmbeddingEnumerator(Enumerator):
    """List the ways to cut every table that constraints and sharders allow, with costs.

    `estimator` fills in the costs: one, or a list; the engine's by default. Grids are listed only for tables
    whose constraints ask for them.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = 512,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:
        self._topology = topology
        self._compute_device = topology.compute_device
        self._world_size = topology.world_size
        self._local_world_size = topology.intra_group_size
        self._batch_size = batch_size
        self._constraints = constraints
        self._sharder_map: dict[str, ModuleSharder[nn.Module]] = {}
        if estimator is None:
            self._estimators: list[ShardEstimator] = [
                EmbeddingPerfEstimator(topology=topology, constraints=constraints),
                EmbeddingStorageEstimator(topology=topology, constraints=constraints),
            ]
        else:
            self._estimators = list(estimator) if isinstance(estimator, Sequence) else [estimator]
        self._last: list[ShardingOption] | None = None

    @property
    def sharder_map(self) -> dict[str, ModuleSharder[nn.Module]]:
        """Return the sharders of the last call, by the names of their modules' types."""
        return self._sharder_map

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """Return what the last call of `enumerate` returned."""
        return self._last

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Return all options of all tables."""
        self._sharder_map = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        options: list[ShardingOption] = []
        for table in tables_of(module, sharders):
            own = (self._constraints or {}).get(table.name, ParameterConstraints())
            if own.device_group is not None and own.device_group != self._compute_device:
                continue
            assert table.sharder is not None
            offered = table.offered_types(self._compute_device)
            found = []
            for cut in self._allowed(offered, own):
                sizes, offsets = calculate_shard_sizes_and_offsets(
                    table.tensor, self._world_size, self._local_world_size, cut, own.min_partition
                )
                for kernel in table.sharder.compute_kernels(cut, self._compute_device):
                    if own.compute_kernels and kernel not in own.compute_kernels:
                        continue
                    found.append(
                        ShardingOption(
                            name=table.name,
                            tensor=table.tensor,
                            module=(table.path, table.module),
                            input_lengths=list(own.pooling_factors),
                            batch_size=self._batch_size,
                            sharding_type=cut,
                            partition_by=get_partition_by_type(cut),
                            compute_kernel=kernel,
                            shards=[Shard(s, o) for s, o in zip(sizes, offsets, strict=True)],
                            cache_params=copy.copy(own.cache_params),
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
            if not found:
                raise PlannerError(
                    f"plan: table {table.name!r} may be {own.sharding_types} with kernels "
                    f"{own.compute_kernels}, and its sharder offers {offered} on {self._compute_device}.",
                    PlannerErrorType.STRICT_CONSTRAINTS,
                )
            options += found
        self.populate_estimates(options)
        self._last = copy.deepcopy(options)
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Fill in what the shards cost."""
        for estimator in self._estimators:
            estimator.estimate(sharding_options, self._sharder_map)

    @staticmethod
    def _allowed(offered: list[str], own: ParameterConstraints) -> list[str]:
        if own.sharding_types:
            return [cut for cut in offered if cut in own.sharding_types]
        return [cut for cut in offered if cut != "grid_shard"]
