"""Graph parallelism under the names of ``ocpmodels.common.gp_utils``.

The ranks form a grid: a row of consecutive ranks splits one graph, a column sees different graphs. The
groups are ordinary torch.distributed groups; the operators are those of `tessera.regions`, which has the
group as an argument and a gather whose gradients are summed. docs/deviations.md says where results differ.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera import _C, regions

_engine = _C.graph_parallel

_GRAPH_PARALLEL_GROUP = None
_DATA_PARALLEL_GROUP = None


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
    global _GRAPH_PARALLEL_GROUP, _DATA_PARALLEL_GROUP
    if not dist.is_initialized():
        raise ValueError(
            "graph.setup_gp: there is no world group yet. Call tessera.comm.init() or "
            "torch.distributed.init_process_group() first."
        )
    world, rank = dist.get_world_size(), dist.get_rank()
    backend = config.get("distributed_backend")
    size = _engine.agree_on_setup(
        int(config["gp_gpus"]), initialized(), zlib.crc32(str(backend).encode()), dist.group.WORLD
    )
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


def cleanup_gp() -> None:
    """Destroy the groups and forget them; setup_gp may then be called again."""
    global _GRAPH_PARALLEL_GROUP, _DATA_PARALLEL_GROUP
    for group in (_DATA_PARALLEL_GROUP, _GRAPH_PARALLEL_GROUP):
        # Destroying the world has destroyed them with it.
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
    _GRAPH_PARALLEL_GROUP = None
    _DATA_PARALLEL_GROUP = None


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
    """Join the ranks' slices; see regions.gather, and regions.gather_shared for message passing."""
    return input if get_gp_world_size() == 1 else regions.gather(input, get_gp_group(), dim)


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
