"""The process-group backend "shm" of torch.distributed."""

from __future__ import annotations

import datetime
import functools
import os

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tessera import _C
from tessera.comm import _failure

NAME = "shm"

# What errors call a group, by the name torch.distributed knows it by.
labels: dict[str, str] = {}


def _timeout_of(options) -> datetime.timedelta:
    # torch fills in its default of 30 minutes when the caller names no limit.
    if options.timeout == c10d.default_pg_timeout and "TESSERA_TIMEOUT" in os.environ:
        return _C.default_timeout()
    return options.timeout


def _create(options, _backend_options):
    world_ranks = list(options.global_ranks_in_group)
    name = labels.get(options.group_id) or (f"group {options.group_id}" if world_ranks else "world")
    _failure.install()
    return _C.make_backend(
        options.store,
        options.group_rank,
        options.group_size,
        _timeout_of(options),
        name,
        world_ranks,
    )


def _accept_shm(torch_function):
    """Return torch's monitored_barrier, for groups of this backend too.

    The torch function looks at the backend's name and refuses all but Gloo before it asks the
    backend, which can do it.
    """

    @functools.wraps(torch_function)
    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
        if c10d._rank_not_in_group(group) or dist.get_backend(group) != NAME:
            return torch_function(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = c10d.default_pg_timeout
        elif not isinstance(timeout, datetime.timedelta):
            timeout = datetime.timedelta(seconds=timeout)
        group = dist.group.WORLD if group is None else group
        return group.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


def register() -> None:
    """Make torch.distributed know the backend. Calling it again changes nothing."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    dist.monitored_barrier = c10d.monitored_barrier = _accept_shm(c10d.monitored_barrier)
