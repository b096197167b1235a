"""Ranks and hosts."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tessera import _C
from tessera.comm._group import group_or_world, make_subgroup

# The groups made for each world group and backend, so that later calls return the same ones.
_made: dict[tuple[ProcessGroup, str | None], tuple[ProcessGroup, ProcessGroup]] = {}


def _has_launcher() -> bool:
    return _C.read_environment().launcher != "none"


def _world_size_or_default(world_size: int | None) -> int | None:
    if world_size is None and dist.is_initialized():
        return dist.get_world_size()
    return world_size


def _rank_or_default(rank: int | None) -> int | None:
    # A launcher's word about this process stands above the arithmetic on its rank.
    if rank is None and dist.is_initialized() and not _has_launcher():
        return dist.get_rank()
    return rank


def _told_local_size(world_size: int | None) -> int | None:
    """Return LOCAL_WORLD_SIZE where no launcher says more, if it divides the job."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if _has_launcher() or not text.isdecimal() or int(text) == 0 or world_size is None:
        return None
    return int(text) if world_size % int(text) == 0 else None


def get_local_size(world_size: int | None = None) -> int:
    """Return the number of processes of this job on this host.

    That is LOCAL_WORLD_SIZE, or the scheduler's word for it, if it divides `world_size` (default: the
    size of the job); `world_size` itself otherwise.

    >>> get_local_size(4)
    4
    """
    world_size = _world_size_or_default(world_size)
    return _told_local_size(world_size) or _C.get_local_size(world_size)


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return this process's number on its host, or that of `rank`.

    >>> get_local_rank(4, 3)
    3
    """
    world_size, rank = _world_size_or_default(world_size), _rank_or_default(rank)
    told = _told_local_size(world_size)
    return _C.get_local_rank(world_size, rank) if told is None or rank is None else rank % told


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the number of this process's host, or of `rank`'s: 0 to get_num_groups() - 1.

    >>> get_group_rank(4, 3)
    0
    """
    world_size, rank = _world_size_or_default(world_size), _rank_or_default(rank)
    told = _told_local_size(world_size)
    return _C.get_group_rank(world_size, rank) if told is None or rank is None else rank // told


def get_num_groups(world_size: int | None = None) -> int:
    """Return the number of hosts.

    >>> get_num_groups(4)
    1
    """
    world_size = _world_size_or_default(world_size)
    told = _told_local_size(world_size)
    return _C.get_num_groups(world_size) if told is None else world_size // told


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Return the group of this host's ranks, and that of the same local rank on all hosts.

    Collective over the world; the first call makes the groups, later calls return the same ones.
    `backend` is the world's if left out. On the meta device, which communicates with nobody, both
    are None. With one host the second is a group of one.

    >>> import tessera, torch.distributed as dist
    >>> world = tessera.comm.init()
    >>> intra, cross = intra_and_cross_node_pg()
    >>> intra.size(), cross.size()
    (1, 1)
    >>> dist.destroy_process_group()
    """
    if device is not None and device.type == "meta":
        return None, None
    world = group_or_world(None)
    if (world, backend) in _made:
        return _made[(world, backend)]
    local_size = get_local_size(world.size())
    host, local_rank = divmod(world.rank(), local_size)
    suffix = f"of {world.group_name}, {backend or 'same backend'}"
    intra = make_subgroup(
        world,
        [host * local_size + place for place in range(local_size)],
        f"intra_node {host} {suffix}",
        "intra_node",
        backend,
    )
    cross = make_subgroup(
        world,
        [place * local_size + local_rank for place in range(world.size() // local_size)],
        f"cross_node {local_rank} {suffix}",
        "cross_node",
        backend,
    )
    _made[(world, backend)] = intra, cross
    return intra, cross
