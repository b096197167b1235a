"""Graph parallelism under the names of ``ocpmodels.common.gp_utils``, and of today's fairchem.

The ranks form a grid: a row of consecutive ranks splits one graph, a column sees different graphs. The
groups are ordinary torch.distributed groups; the operators are those of `tessera.regions`, which has the
group as an argument and a gather whose gradients are summed. docs/deviations.md says where results differ.
"""

from __future__ import annotations

import dataclasses
import enum
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera import _C, regions

_engine = _C.graph_parallel

_GRAPH_PARALLEL_GROUP = None
_DATA_PARALLEL_GROUP = None
_GP_CONFIG: GraphParallelConfig | None = None


class GPMode(str, enum.Enum):  # noqa: UP042  (Python 3.10)
    """How a model brings rows of other ranks: all of them, or those that it needs (a HaloPlan)."""

    ALLGATHER = "allgather"
    ALL_TO_ALL = "all_to_all"


class GPPartition(str, enum.Enum):  # noqa: UP042
    """How a model gives nodes to ranks: by their numbers, or by their places."""

    INDEX_SPLIT = "index_split"
    SPATIAL = "spatial"


@dataclasses.dataclass
class GraphParallelConfig:
    """What a model asks for; kept for it by set_gp_config. Only `group_size` means something here."""

    group_size: int = 1
    mode: GPMode = GPMode.ALLGATHER
    partition: GPPartition = GPPartition.INDEX_SPLIT


def ensure_div(a: int, b: int) -> None:
    """Raise ValueError unless `b` divides `a`.

    >>> ensure_div(8, 4)
    """
    _engine.ensure_div(a, b)


def divide_and_check_no_remainder(a: int, b: int) -> int:
    """Return ``a // b``; ValueError if there is a remainder.

    >>> divide_and_check_no_remainder(12, 4)
    3
    """
    return _engine.divide_and_check_no_remainder(a, b)


def setup_gp(config) -> None:
    """Make the groups of this rank from ``config["gp_gpus"]`` and ``config["distributed_backend"]``.

    Collective over the world. A group larger than the world is the world. ValueError if the size does not
    divide the world's, or if the groups are there already; an error on all ranks if they ask for different
    ones. A backend of None is the world's.
    """
    _make_groups(int(config["gp_gpus"]), config.get("distributed_backend"), "setup_gp", is_clamped=True)


def setup_graph_parallel_groups(graph_parallel_group_size: int, distributed_backend: str | None) -> None:
    """Make the groups of this rank. As setup_gp, but a group larger than the world is a ValueError."""
    _make_groups(
        graph_parallel_group_size, distributed_backend, "setup_graph_parallel_groups", is_clamped=False
    )


def _make_groups(wanted: int, backend: str | None, name: str, is_clamped: bool) -> None:
    global _GRAPH_PARALLEL_GROUP, _DATA_PARALLEL_GROUP
    if not dist.is_initialized():
        raise ValueError(
            f"graph.{name}: there is no world group yet. Call tessera.comm.init() or "
            "torch.distributed.init_process_group() first."
        )
    world, rank = dist.get_world_size(), dist.get_rank()
    size = _engine.agree_on_setup(
        wanted, initialized(), zlib.crc32(f"{name} {backend}".encode()), dist.group.WORLD
    )
    if wanted > world and not is_clamped:
        raise ValueError(f"graph.{name}: a group of {wanted} ranks is larger than the world, {world}.")
    # Every rank makes all groups in the same order: making one is collective over the world.
    for first in range(size):
        members = list(range(first, world, size))
        group = dist.new_group(members, backend=backend)
        if rank in members:
            _DATA_PARALLEL_GROUP = group
    for first in range(0, world, size):
        members = list(range(first, first + size))
        group = dist.new_group(members, backend=backend)
        if rank in members:
            _GRAPH_PARALLEL_GROUP = group
    if _GP_CONFIG is None:
        set_gp_config(GraphParallelConfig(group_size=size))


def set_gp_config(config: GraphParallelConfig | Mapping[str, Any] | None) -> None:
    """Keep what a model asks for until cleanup_gp. A mapping with these keys becomes a GraphParallelConfig.

    >>> set_gp_config({"group_size": 2, "mode": "all_to_all"})
    >>> get_gp_config().mode is GPMode.ALL_TO_ALL
    True
    >>> set_gp_config(None)
    """
    global _GP_CONFIG
    if config is not None and not isinstance(config, GraphParallelConfig):
        config = GraphParallelConfig(**dict(config))
        config.mode, config.partition = GPMode(config.mode), GPPartition(config.partition)
    _GP_CONFIG = config


def get_gp_config() -> GraphParallelConfig | None:
    """Return what set_gp_config keeps, or what the groups were made with; None before."""
    return _GP_CONFIG


def resolve_gp_config_for_workers(
    gp_config: GraphParallelConfig | None, num_workers: int
) -> GraphParallelConfig | None:
    """Return the configuration for so many workers: all of them, unless it says otherwise already.

    ValueError if it asks for another number than there are. The argument is left as it is.

    >>> resolve_gp_config_for_workers(None, 4).group_size
    4
    """
    if num_workers <= 1:
        return gp_config
    config = GraphParallelConfig() if gp_config is None else gp_config
    if config.group_size not in (1, num_workers):
        raise ValueError(
            f"graph.resolve_gp_config_for_workers: groups of {config.group_size} ranks do not fit "
            f"{num_workers} workers."
        )
    return config if config.group_size == num_workers else dataclasses.replace(config, group_size=num_workers)


def cleanup_gp() -> None:
    """Destroy the groups and forget them; setup_gp may then be called again."""
    global _GRAPH_PARALLEL_GROUP, _DATA_PARALLEL_GROUP, _GP_CONFIG
    for group in (_DATA_PARALLEL_GROUP, _GRAPH_PARALLEL_GROUP):
        # Destroying the world has destroyed them with it.
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
    _GRAPH_PARALLEL_GROUP = None
    _DATA_PARALLEL_GROUP = None
    _GP_CONFIG = None


def initialized() -> bool:
    """Return whether there is a graph-parallel group."""
    return _GRAPH_PARALLEL_GROUP is not None


def get_dp_group():
    """Return the data-parallel group, or None before setup_gp."""
    return _DATA_PARALLEL_GROUP


def get_gp_group():
    """Return the graph-parallel group, or None before setup_gp."""
    return _GRAPH_PARALLEL_GROUP


def get_dp_rank() -> int:
    """Return this rank's place in the data-parallel group; in the world before setup_gp."""
    return dist.get_rank(_DATA_PARALLEL_GROUP) if dist.is_initialized() else 0


def get_gp_rank() -> int:
    """Return this rank's place in the graph-parallel group; 0 before setup_gp.

    >>> get_gp_rank()
    0
    """
    return dist.get_rank(_GRAPH_PARALLEL_GROUP) if initialized() else 0


def get_dp_world_size() -> int:
    """Return the size of the data-parallel group; of the world before setup_gp."""
    return dist.get_world_size(_DATA_PARALLEL_GROUP) if dist.is_initialized() else 1


def get_gp_world_size() -> int:
    """Return the size of the graph-parallel group; 1 before setup_gp.

    >>> get_gp_world_size()
    1
    """
    return dist.get_world_size(_GRAPH_PARALLEL_GROUP) if initialized() else 1


def pad_tensor(tensor: Tensor, dim: int = -1, target_size: int | None = None) -> Tensor:
    """Grow `dim` with zeros to `target_size`, or to a multiple of the group's size.

    >>> pad_tensor(torch.ones(2), target_size=4)
    tensor([1., 1., 0., 0.])
    """
    return _engine.pad_tensor(tensor, dim, target_size, get_gp_world_size())


def pad_input(input: Tensor, padded_size: int) -> Tensor:
    """Grow the first dimension with zeros to `padded_size`."""
    return pad_tensor(input, 0, padded_size)


def size_list_fn(size: int, parts: int) -> list[int]:
    """Return the sizes of `parts` pieces that differ by at most one, the larger ones first.

    >>> size_list_fn(7, 3)
    [3, 2, 2]
    """
    return [size // parts + (i < size % parts) for i in range(parts)]


def trim_tensor(tensor: Tensor, sizes: Tensor | None = None, dim: int = 0):
    """Shrink `dim` to a multiple of the group's size; return the tensor and the sizes that remain."""
    return _engine.trim_tensor(tensor, sizes, dim, get_gp_world_size())


def _split_tensor(tensor: Tensor, num_parts: int, dim: int = -1, contiguous_chunks: bool = False):
    """Return exactly `num_parts` pieces that differ by at most one, the larger ones first.

    >>> [part.tolist() for part in _split_tensor(torch.arange(5), 4)]
    [[0, 1], [2], [3], [4]]
    """
    return tuple(_engine.split_tensor(tensor, num_parts, dim, contiguous_chunks))


def _reduce(ctx: Any, input: Tensor) -> Tensor:
    """Return the sum over the group as a new tensor; `ctx` is not used."""
    if get_gp_world_size() == 1:
        return input
    with torch.no_grad():
        return regions.reduce(input, get_gp_group())


def _split(input: Tensor, dim: int = -1) -> Tensor:
    """Return this rank's piece of _split_tensor."""
    if get_gp_world_size() == 1:
        return input
    return _split_tensor(input, get_gp_world_size(), dim)[get_gp_rank()].contiguous()


def _gather(input: Tensor, dim: int = -1) -> Tensor:
    """Join the ranks' tensors, which have the same shape, along `dim`."""
    if get_gp_world_size() == 1:
        return input
    with torch.no_grad():
        return regions.gather(input, get_gp_group(), dim, [input.size(dim)] * get_gp_world_size())


def _gather_with_padding(input: Tensor, dim: int = -1) -> Tensor:
    """Join the ranks' tensors, which may differ along `dim`; nothing is padded."""
    if get_gp_world_size() == 1:
        return input
    with torch.no_grad():
        return regions.gather(input, get_gp_group(), dim)


def copy_to_model_parallel_region(input: Tensor) -> Tensor:
    """Return `input` for use in work that differs between ranks; see regions.copy."""
    return input if get_gp_world_size() == 1 else regions.copy(input, get_gp_group())


def reduce_from_model_parallel_region(input: Tensor) -> Tensor:
    """Return the sum over the group as a new tensor; see regions.reduce."""
    return input if get_gp_world_size() == 1 else regions.reduce(input, get_gp_group())


def scatter_to_model_parallel_region(input: Tensor, dim: int = -1) -> Tensor:
    """Return this rank's slice of `input`; see regions.scatter."""
    return input if get_gp_world_size() == 1 else regions.scatter(input, get_gp_group(), dim)


def gather_from_model_parallel_region(input: Tensor, dim: int = -1) -> Tensor:
    """Join the ranks' slices, of which all ranks then make the same; see regions.gather.

    For message passing, where ranks go on differently, it is regions.gather_shared.
    """
    return input if get_gp_world_size() == 1 else regions.gather(input, get_gp_group(), dim)


def gather_from_model_parallel_region_sum_grad(input: Tensor, natoms: int) -> Tensor:
    """Join the ranks' rows, cut as size_list_fn does; gradients are summed. See regions.gather_shared."""
    size = get_gp_world_size()
    return input if size == 1 else regions.gather_shared(input, get_gp_group(), 0, size_list_fn(natoms, size))


def all_reduce_sum_with_grad(input: Tensor) -> Tensor:
    """Return the sum over the group, for ranks that go on differently: its gradient is summed, too."""
    return input if get_gp_world_size() == 1 else regions.all_reduce(input, get_gp_group())


def scale_backward_grad(input: Tensor) -> Tensor:
    """Return `input`; its gradient is multiplied by the group's size.

    For a loss that every rank of a graph holds, under data parallelism over all ranks: the average then
    divides by the number of graphs, not of ranks.
    """
    return ScaleBackwardGrad.apply(input)


class ScaleBackwardGrad(torch.autograd.Function):
    """The reference's spelling of scale_backward_grad: call `apply`."""

    @staticmethod
    def forward(ctx, input: Tensor) -> Tensor:
        ctx.scale = get_gp_world_size()
        return input.view_as(input)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return ctx.scale * grad_output


class CopyToModelParallelRegion(torch.autograd.Function):
    """The reference's spelling of copy_to_model_parallel_region: call `apply`."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        return copy_to_model_parallel_region(input)

    @staticmethod
    def forward(ctx, input: Tensor) -> Tensor:
        return input

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return reduce_from_model_parallel_region(grad_output)


class ReduceFromModelParallelRegion(torch.autograd.Function):
    """The reference's spelling of reduce_from_model_parallel_region: call `apply`."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        return reduce_from_model_parallel_region(input)

    @staticmethod
    def forward(ctx, input: Tensor) -> Tensor:
        return _reduce(ctx, input)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return copy_to_model_parallel_region(grad_output)


class ScatterToModelParallelRegion(torch.autograd.Function):
    """The reference's spelling of scatter_to_model_parallel_region: call `apply`."""

    @staticmethod
    def apply(input: Tensor, dim: int = -1) -> Tensor:
        return scatter_to_model_parallel_region(input, dim)

    @staticmethod
    def forward(ctx, input: Tensor, dim: int = -1) -> Tensor:
        ctx.dim = dim
        return _split(input, dim)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return gather_from_model_parallel_region(grad_output, ctx.dim), None


class GatherFromModelParallelRegion(torch.autograd.Function):
    """The reference's spelling of gather_from_model_parallel_region: call `apply`."""

    @staticmethod
    def apply(input: Tensor, dim: int = -1) -> Tensor:
        return gather_from_model_parallel_region(input, dim)

    @staticmethod
    def forward(ctx, input: Tensor, dim: int = -1) -> Tensor:
        ctx.dim = dim
        ctx.sizes = None
        if get_gp_world_size() == 1:
            return input
        extents = regions.gather(torch.tensor([input.size(dim)]), get_gp_group())
        ctx.sizes = extents.tolist()
        with torch.no_grad():
            return regions.gather(input, get_gp_group(), dim, ctx.sizes)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        if ctx.sizes is None:
            return grad_output, None
        return regions.scatter(grad_output, get_gp_group(), ctx.dim, ctx.sizes), None
