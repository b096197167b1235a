"""Graph parallelism under the names and signatures of today's ``fairchem.core.common.gp_utils``.

Groups and configuration are one with those of `tessera.common.gp_utils`, which has the older signatures:
here rows are atoms, and sizes come from their number. docs/deviations.md says where results differ.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tessera import regions
from tessera.common.gp_utils import (
    GPMode,
    GPPartition,
    GraphParallelConfig,
    ReduceFromModelParallelRegion,
    ScaleBackwardGrad,
    all_reduce_sum_with_grad,
    cleanup_gp,
    divide_and_check_no_remainder,
    ensure_div,
    gather_from_model_parallel_region_sum_grad,
    get_dp_group,
    get_dp_rank,
    get_dp_world_size,
    get_gp_config,
    get_gp_group,
    get_gp_rank,
    get_gp_world_size,
    initialized,
    pad_input,
    reduce_from_model_parallel_region,
    resolve_gp_config_for_workers,
    scale_backward_grad,
    set_gp_config,
    setup_gp,
    setup_graph_parallel_groups,
    size_list_fn,
)

__all__ = [
    "AllReduceSumWithGrad",
    "GPMode",
    "GPPartition",
    "GatherFromModelParallelRegionGradPadded",
    "GatherFromModelParallelRegionSumGradPadded",
    "GraphParallelConfig",
    "ReduceFromModelParallelRegion",
    "ScaleBackwardGrad",
    "ScatterToModelParallelRegion",
    "all_reduce_sum_with_grad",
    "cleanup_gp",
    "divide_and_check_no_remainder",
    "ensure_div",
    "gather_from_model_parallel_region",
    "gather_from_model_parallel_region_sum_grad",
    "get_dp_group",
    "get_dp_rank",
    "get_dp_world_size",
    "get_gp_config",
    "get_gp_group",
    "get_gp_rank",
    "get_gp_world_size",
    "initialized",
    "pad_input",
    "reduce_from_model_parallel_region",
    "resolve_gp_config_for_workers",
    "scale_backward_grad",
    "scatter_to_model_parallel_region",
    "set_gp_config",
    "setup_gp",
    "setup_graph_parallel_groups",
    "size_list_fn",
]


def scatter_to_model_parallel_region(input: Tensor) -> Tensor:
    """Return this rank's rows of `input`, cut as size_list_fn does; see regions.scatter."""
    return input if get_gp_world_size() == 1 else regions.scatter(input, get_gp_group(), 0)


def gather_from_model_parallel_region(input: Tensor, natoms: int) -> Tensor:
    """Join the ranks' rows, `natoms` in all, cut as size_list_fn does; all ranks then make the same of them.

    See regions.gather. For message passing it is gather_from_model_parallel_region_sum_grad.
    """
    size = get_gp_world_size()
    return input if size == 1 else regions.gather(input, get_gp_group(), 0, size_list_fn(natoms, size))


class AllReduceSumWithGrad:
    """The reference's spelling of all_reduce_sum_with_grad: call `apply`."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        return all_reduce_sum_with_grad(input)


class ScatterToModelParallelRegion:
    """The reference's spelling of scatter_to_model_parallel_region: call `apply`."""

    @staticmethod
    def apply(input: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's rows; `dim` is the reference's, which has no effect there either."""
        return scatter_to_model_parallel_region(input)


def _of_each_rank(input: Tensor, gather: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    size = get_gp_world_size()
    if size == 1:
        return (input,)
    return gather(input, get_gp_group(), 0, [input.size(0)] * size).tensor_split(size)


class GatherFromModelParallelRegionGradPadded:
    """Join equally many rows of every rank: call `apply`, which returns them rank by rank."""

    @staticmethod
    def apply(input: Tensor) -> tuple[Tensor, ...]:
        return _of_each_rank(input, regions.gather)


class GatherFromModelParallelRegionSumGradPadded:
    """As GatherFromModelParallelRegionGradPadded; gradients are summed over the ranks."""

    @staticmethod
    def apply(input: Tensor) -> tuple[Tensor, ...]:
        return _of_each_rank(input, regions.gather_shared)
