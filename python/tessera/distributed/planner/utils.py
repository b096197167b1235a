"""Sizes and names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from tessera.distributed.planner.types import ShardingOption, Storage

__all__ = [
    "bytes_to_gb",
    "bytes_to_mb",
    "gb_to_bytes",
    "mb_to_bytes",
    "placement",
    "prod",
    "reset_shard_rank",
    "sharder_name",
    "storage_repr_in_gb",
]


def sharder_name(kind: type[nn.Module]) -> str:
    """Return the name of a module's class, with its module.

    >>> sharder_name(nn.Linear)
    'torch.nn.modules.linear.Linear'
    """
    return f"{kind.__module__}.{kind.__name__}"


def bytes_to_gb(num_bytes: int) -> float:
    """Return bytes as GiB."""
    return float(num_bytes / 1024**3)


def bytes_to_mb(num_bytes: float) -> float:
    """Return bytes as MiB."""
    return float(num_bytes / 1024**2)


def gb_to_bytes(gb: float) -> int:
    """Return GiB as bytes."""
    return int(gb * 1024**3)


def mb_to_bytes(mb: float) -> int:
    """Return MiB as bytes."""
    return int(mb * 1024**2)


def prod(iterable: Iterable[int]) -> int:
    """Return the product of whole numbers; 1 of none."""
    product = 1
    for value in iterable:
        product *= value
    return product


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Return where rank `rank` of a host of `local_size` keeps its shards.

    >>> placement("cuda", 9, 8), placement("cpu", 9, 8)
    ('rank:9/cuda:1', 'rank:9/cpu')
    """
    device = compute_device if compute_device == "cpu" else f"{compute_device}:{rank % local_size}"
    return f"rank:{rank}/{device}"


def reset_shard_rank(proposal: list[ShardingOption]) -> None:
    """Take every shard off its rank."""
    for option in proposal:
        for shard in option.shards:
            shard.rank = None


def storage_repr_in_gb(storage: Storage | None) -> str:
    """Return a storage in words."""
    if storage is None:
        return ""
    text = f"Storage(hbm = {bytes_to_gb(storage.hbm):.3f} GB, ddr = {bytes_to_gb(storage.ddr):.3f} GB"
    return text + (f", ssd = {bytes_to_gb(storage.ssd):.3f} GB)" if storage.ssd else ")")
