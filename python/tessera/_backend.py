"""The process-group backend "shm" of torch.distributed."""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
import sys

import torch
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
    _give_dtensor_our_all_to_all()
    leave_sharded_tensors_on_the_cpu()
    store = options.store
    if world_ranks:
        # Ranks may make groups that others do not know of, such as one of themselves alone; torch gives
        # all of them the same name.
        store = dist.PrefixStore("ranks " + " ".join(map(str, world_ranks)), store)
    return _C.make_backend(
        store,
        options.group_rank,
        options.group_size,
        _timeout_of(options),
        name,
        world_ranks,
    )


def _engine_of(group):
    """Return the group's engine of this backend, None if it has another."""
    cpu = torch.device("cpu")
    engine = group._get_backend(cpu) if cpu in group._device_types else None
    return engine if engine is not None and engine.name() == NAME else None


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


def _limit_shm(torch_function):
    """Return torch's _set_pg_timeout, for groups of this backend too."""

    @functools.wraps(torch_function)
    def set_timeout(timeout, group=None):
        if c10d._rank_not_in_group(group) or dist.get_backend(group) != NAME:
            return torch_function(timeout, group)
        group = dist.group.WORLD if group is None else group
        if not isinstance(timeout, datetime.timedelta):
            raise TypeError(f"timeout argument must be of type datetime.timedelta, but got {type(timeout)}.")
        group.set_timeout(timeout)
        return None

    return set_timeout


def _number_shm(torch_method):
    """Return a method of torch's ProcessGroup about sequence numbers, for groups of this backend too.

    The method knows by name which backends count, and refuses all others.
    """

    @functools.wraps(torch_method)
    def method(self):
        engine = _engine_of(self)
        return torch_method(self) if engine is None else getattr(engine, torch_method.__name__)()

    return method


def leave_sharded_tensors_on_the_cpu() -> None:
    """Let a ShardedTensor over this backend be on the CPU where a rank has no part of it.

    torch takes every backend but one named Gloo for one of GPUs, and asks CUDA, which loading a checkpoint
    does not survive without one.
    """
    module = sys.modules.get("torch.distributed._shard.sharded_tensor.api")
    operators = getattr(module, "_SHARDED_OPS", {})
    torch_function = operators.get(torch.Tensor.device.__get__)
    if torch_function is None or hasattr(torch_function, "asks_shm"):
        return

    @functools.wraps(torch_function)
    def device(types, args=(), kwargs=None, pg=None):
        is_elsewhere = pg is None or len(pg._device_types) > 1 or _engine_of(pg) is None
        if is_elsewhere or args[0].local_shards():
            return torch_function(types, args, kwargs, pg)
        return torch.device("cpu")

    device.asks_shm = True
    operators[torch.Tensor.device.__get__] = device


def _give_dtensor_our_all_to_all() -> None:
    """Let DTensor move shards between dimensions by all-to-all.

    For the CPU it takes a gather of everything instead, and says that there is no all-to-all.
    """
    module = sys.modules.get("torch.distributed.tensor._collective_utils")
    torch_function = getattr(module, "shard_dim_alltoall", None)
    if torch_function is None or hasattr(torch_function, "__wrapped__"):
        return

    @functools.wraps(torch_function)
    def shard_dim_alltoall(input, gather_dim, shard_dim, mesh, mesh_dim):
        if mesh.device_type != "cpu" or type(input) is not torch.Tensor:
            return torch_function(input, gather_dim, shard_dim, mesh, mesh_dim)
        group = mesh.get_group(mesh_dim)
        if dist.get_backend(group) != NAME:
            return torch_function(input, gather_dim, shard_dim, mesh, mesh_dim)
        return torch.ops._dtensor.shard_dim_alltoall(input, gather_dim, shard_dim, group.group_name)

    for name in ("_collective_utils", "placement_types"):
        user = sys.modules.get(f"torch.distributed.tensor.{name}")
        if getattr(user, "shard_dim_alltoall", None) is torch_function:
            user.shard_dim_alltoall = shard_dim_alltoall


def _leave_torchs_engines_to_the_parent() -> None:
    """Let a forked child neither shut down nor destroy torch's own engines of its parent: NCCL, Gloo.

    Both wait for threads that the child does not have, so a child that ends as an interpreter does, or
    that destroys the groups, would never end. Ours knows whose it is.
    """
    names = c10d._world.pg_names
    for group in list(names):
        engines = [group._get_backend(device) for device in group._device_types]
        inherited = [engine for engine in engines if type(engine) is not dist._Backend]
        for engine in inherited:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))  # never destroyed
        if inherited:
            del names[group]  # destroy_process_group() shuts down what is named here


def register() -> None:
    """Make torch.distributed know the backend. Calling it again changes nothing."""
    if NAME.upper() in dist.Backend._plugins:
        return
    os.register_at_fork(after_in_child=_leave_torchs_engines_to_the_parent)
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    c10d._set_pg_timeout = _limit_shm(c10d._set_pg_timeout)
    for name in ("_get_sequence_number_for_group", "_set_sequence_number_for_group"):
        setattr(dist.ProcessGroup, name, _number_shm(getattr(dist.ProcessGroup, name)))
    dist.monitored_barrier = c10d.monitored_barrier = _accept_shm(c10d.monitored_barrier)
