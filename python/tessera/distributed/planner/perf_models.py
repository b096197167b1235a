"""Ratings of plans."""

from __future__ import annotations

from collections import defaultdict

from tessera.distributed.planner.types import PerfModel, ShardingOption, Topology

__all__ = ["NoopPerfModel", "NoopStorageModel"]


def _largest(plan: list[ShardingOption], value_of) -> float:
    sums: dict[int, float] = defaultdict(float)
    for option in plan:
        for shard in option.shards:
            sums[shard.rank] += value_of(shard)
    return max(sums.values(), default=0.0)


class NoopPerfModel(PerfModel):
    """Rate a plan by its slowest rank."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """Return milliseconds of the slowest rank."""
        return _largest(plan, lambda shard: shard.perf.total)


class NoopStorageModel(PerfModel):
    """Rate a plan by its fullest rank."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """Return bytes of the fullest rank."""
        on_device = self._topology.compute_device != "cpu"
        return _largest(plan, lambda shard: shard.storage.hbm if on_device else shard.storage.ddr)
