"""What a planner tells."""

from __future__ import annotations

import logging
from typing import Any

from tessera.distributed.planner.types import ShardingOption, Stats

__all__ = ["EmbeddingStats", "NoopEmbeddingStats"]

logger = logging.getLogger(__name__)


class EmbeddingStats(Stats):
    """Write a line a table and a line a rank into the log."""

    def log(self, sharding_plan, topology, batch_size, storage_reservation, num_proposals, num_plans,
            run_time, best_plan: list[ShardingOption], *args: Any, **kwargs: Any) -> None:  # fmt: skip
        """Take what there is to tell."""
        seconds: dict[int, float] = {}
        held: dict[int, int] = {}
        lines = [f"{len(best_plan)} tables on {topology.world_size} ranks, planned in {run_time:.3f} s"]
        for option in best_plan:
            ranks = [shard.rank for shard in option.shards]
            lines.append(f"{option.fqn:<40.40} {option.sharding_type:<17} {ranks}")
            for shard in option.shards:
                seconds[shard.rank] = seconds.get(shard.rank, 0.0) + shard.perf.total
                held[shard.rank] = held.get(shard.rank, 0) + shard.storage.hbm + shard.storage.ddr
        lines += [f"rank {r:<5} {seconds[r]:10.4g} ms {held[r] / 1e9:10.4g} GB" for r in sorted(seconds)]
        logger.info("\n".join(lines))


class NoopEmbeddingStats(Stats):
    """Tell nothing."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Take what there is to tell, and leave it."""
