"""States of sharded models, made whole on rank 0 or moved to another device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

__all__ = ["state_dict_all_gather_keys", "state_dict_gather", "state_dict_to_device"]

State = dict[str, torch.Tensor | ShardedTensor]


def state_dict_gather(src: State, dst: dict[str, torch.Tensor]) -> None:
    """Fill the tensors of `dst` from entries of the same names: sharded ones on rank 0 alone. Collective."""
    for name, whole in dst.items():
        given = src[name]
        if isinstance(given, ShardedTensor):
            given.gather(out=whole if dist.get_rank() == 0 else None, dtype=whole.dtype)
        elif isinstance(given, torch.Tensor):
            whole.copy_(given)
        else:
            raise ValueError(f"state_dict_gather: {name!r} is a {type(given).__name__}, no tensor.")


def state_dict_all_gather_keys(state_dict: State, pg: ProcessGroup) -> list[str]:
    """Return the names that any rank has, sorted. Collective."""
    found: list[list[str] | None] = [None] * pg.size()
    dist.all_gather_object(found, list(state_dict), pg)
    return sorted({name for names in found for name in names or ()})


def state_dict_to_device(state_dict: State, pg: ProcessGroup, device: torch.device) -> State:
    """Return the state on a device. Names that other ranks have are sharded tensors without a shard here.

    Collective: every rank calls it, with its own part of the state.
    """
    moved: State = {}
    for name in state_dict_all_gather_keys(state_dict, pg):
        given = state_dict.get(name)
        if given is None or isinstance(given, ShardedTensor):
            moved[name] = _sharded_on(given, pg, device)
        elif isinstance(given, torch.Tensor):
            moved[name] = given.to(device)
        else:
            raise ValueError(f"state_dict_to_device: {name!r} is a {type(given).__name__}, no tensor.")
    return moved


def _sharded_on(given: ShardedTensor | None, pg: ProcessGroup, device: torch.device) -> ShardedTensor:
    shards = [] if given is None else given.local_shards()
    local = [
        Shard.from_tensor_and_offsets(shard.tensor.to(device), shard.metadata.shard_offsets, dist.get_rank())
        for shard in shards
    ]
    size = [] if given is None else given.metadata().size
    return ShardedTensor._init_from_local_shards(local, size, process_group=pg)
