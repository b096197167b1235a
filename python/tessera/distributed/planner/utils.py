"""Sizes and names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from tessera.distributed.planner.types import ShardingOption, Storage

__all__ = [
    "BinarySearchPredicate",
    "LuusJaakolaSearch",
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


def options_by_table(options: Iterable[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """Return the options of each table, in their order."""
    tables: dict[str, list[ShardingOption]] = {}
    for option in options:
        tables.setdefault(option.fqn, []).append(option)
    return tables


def option_score(option: ShardingOption, use_depth: bool = True) -> float:
    """Return the milliseconds of the longest shard, or of all together."""
    times = [shard.perf.total for shard in option.shards if shard.perf is not None]
    return max(times, default=0.0) if use_depth else sum(times)


class BinarySearchPredicate:
    """Look for the largest whole number from A to B for which something holds, as asked from outside.

    The search ends once fewer than `tolerance` numbers are left.
    """

    def __init__(self, A: int, B: int, tolerance: int) -> None:
        self.left, self.right, self.tolerance = A, B, tolerance
        self.first = True

    def next(self, prior_result: bool) -> int | None:
        """Return what to try next, given how the last try did (the first time: whatever); None at the end."""
        middle = (self.left + self.right) // 2
        if not self.first and self.right - self.left >= self.tolerance:
            if prior_result:
                self.left = middle + 1
            else:
                self.right = middle - 1
        self.first = False
        if self.right - self.left < self.tolerance:
            return None
        return (self.left + self.right) // 2


class LuusJaakolaSearch:
    """Look for the least of a function between A and B by random steps that shrink when one helped.

    The ends are tried at most once. Equal seeds give equal searches.
    """

    def __init__(
        self, A: float, B: float, max_iterations: int, seed: int = 42, left_cost: float | None = None
    ) -> None:
        self.left, self.right = A, B
        self.iteration, self.max_iterations = -1, max_iterations
        self._random = torch.Generator()
        self._random.manual_seed(seed)
        self.x, self.fx = self.uniform(A, B), 0.0
        self.y = math.nan
        self.fleft, self.fright = left_cost, None
        self.d = B - A

    def shrink_right(self, B: float) -> None:
        """Leave out everything from B on."""
        self.right, self.fright = B, math.inf
        self.d = B - self.left
        self.x = self.clamp(self.x)

    def clamp(self, x: float) -> float:
        """Return the nearest place that is searched."""
        return min(max(x, self.left), self.right)

    def uniform(self, A: float, B: float) -> float:
        """Return a random place from A to B."""
        return A + (B - A) * torch.rand(1, generator=self._random).item()

    def next(self, fy: float) -> float | None:
        """Return the next place to try, given the value at the last (the first time: whatever)."""
        self.iteration += 1
        if self.iteration == 0:
            return self.x
        if self.iteration == self.max_iterations or self.right <= self.left:
            return None
        if self.iteration == 1:
            self.fx = fy
        elif fy <= self.fx:
            self.x, self.fx = self.y, fy
            self.d *= 0.95
        if self.y == self.left:
            self.fleft = fy
        elif self.y == self.right:
            self.fright = fy
        for _ in range(1000):
            self.y = self.clamp(self.x + self.uniform(-self.d, self.d))
            is_known = (self.y == self.left and self.fleft is not None) or (
                self.y == self.right and self.fright is not None
            )
            if not is_known:
                return self.y
        return None

    def best(self) -> tuple[float, float]:
        """Return the best place so far, and its value."""
        return self.x, self.fx
