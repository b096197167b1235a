"""Joining a job, and sub-groups that torch.distributed knows."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from tessera import _C
from tessera.comm import _failure


def group_or_world(group: ProcessGroup | None) -> ProcessGroup:
    """Return `group`, or the world group if it is None."""
    if group is not None:
        return group
    if not dist.is_initialized():
        raise ValueError(
            "comm: there is no world group yet. Call tessera.comm.init() or "
            "torch.distributed.init_process_group() first."
        )
    return dist.group.WORLD


def init(backend: str | None = None, timeout: datetime.timedelta | float | None = None) -> ProcessGroup:
    """Join the job this process was started for and return its world group.

    Collective over the whole job. The environment of `tessera run`, torchrun, Slurm or Open MPI says
    who this is; a process without any is a world of one. The group is torch.distributed's default
    group, so everything there works on it. `backend` is as in `init_process_group`; by default CPU
    tensors go through "shm", and CUDA tensors through NCCL if both are there. `timeout` is the limit
    of every wait (seconds or a timedelta; default TESSERA_TIMEOUT, or ten minutes).

    Raises ValueError for an environment that makes no sense and CommError of kind "rendezvous" when
    the ranks do not find each other. An uncaught exception of this process is reported to the others
    and to the launcher from then on.

    >>> import torch.distributed as dist
    >>> world = init()
    >>> world.size(), dist.get_rank()
    (1, 0)
    >>> dist.destroy_process_group()
    """
    if dist.is_initialized():
        raise ValueError(
            "comm.init: torch.distributed has a default group already (backend "
            f"'{dist.get_backend()}'). Use it, or destroy it first."
        )
    environment = _C.read_environment()
    if timeout is None:
        timeout = _C.default_timeout()
    elif not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    if backend is None:
        has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        backend = "cpu:shm,cuda:nccl" if has_nccl else "shm"
    _failure.install()
    dist.init_process_group(
        backend,
        store=_C.connect_store(environment, timeout),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
    )
    return dist.group.WORLD


def engine(group: ProcessGroup | None = None) -> str:
    """Return what carries the CPU tensors of the group: "shm", "gloo" or "shm+gloo"."""
    return _C.engine(group_or_world(group))


def abort(reason: str, group: ProcessGroup | None = None) -> None:
    """End every wait of every rank of the group with a CommError that says `reason`.

    Not collective; any thread. The group cannot be used afterwards.
    """
    _C.abort(group_or_world(group), reason)


def make_subgroup(
    world: ProcessGroup,
    ranks: list[int],
    name: str,
    label: str,
    backend: str | None = None,
    timeout: datetime.timedelta | None = None,
) -> ProcessGroup:
    """Make the group of `ranks` (of `world`, ascending, this one among them).

    Collective over those ranks only: `name` tells the group from all others, so no rank needs to
    know how many groups the other ranks have made, as it would with new_group. Errors call the
    group `label`.
    """
    # See docs/python.md, "Groups of a mesh": new_group numbers groups by a process-wide count.
    from tessera import _backend

    c10d_world = c10d._world
    if world not in c10d_world.pg_map:
        raise ValueError(f"comm.mesh: '{name}' needs a group that torch.distributed made.")
    world_ranks = [dist.get_global_rank(world, rank) for rank in ranks]
    if backend is None:
        backend = c10d_world.pg_map[world][0]
    if timeout is None:
        timeout = _timeout_of(world)
    store = c10d_world.pg_map[dist.group.WORLD][1]
    _backend.labels[name] = label
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(world.rank()),
        world_ranks,
        dist.Backend(backend),
        store,
        name,
        timeout=timeout,
        group_desc=label,
    )
    c10d_world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(world_ranks)}
    return group


def _timeout_of(world: ProcessGroup) -> datetime.timedelta:
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        if options is not None and getattr(options, "_timeout", None) is not None:
            return options._timeout
    return c10d.default_pg_timeout
