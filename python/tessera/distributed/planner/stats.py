"""What a planner tells."""

from __future__ import annotations

import json
import logging
from typing import Any

from tessera.distributed.planner.types import ShardingOption, Stats

__all__ = ["EmbeddingStats", "NoopEmbeddingStats"]

logger = logging.getLogger(__name__)


class EmbeddingStats(Stats):
    """Write a line a table and a line a rank into the log, and how far the plan is from the best at most."""

    def log(self, sharding_plan, topology, batch_size, storage_reservation, num_proposals, num_plans,
            run_time, best_plan: list[ShardingOption], *args: Any, **kwargs: Any) -> None:  # fmt: skip
        """Take what there is to tell."""
        seconds: dict[int, float] = {}
        held: dict[int, int] = {}
        lines = [f"{len(best_plan)} tables on {topology.world_size} ranks, planned in {run_time:.3f} s"]
        proof = getattr(kwargs.get("debug_stats"), "result", None)
        others: dict[str, str] = {}
        if proof is not None:
            lines.append(
                f"{1e3 * proof.plan_seconds:.4g} ms a step, no plan can be under "
                f"{1e3 * proof.bound_seconds:.4g} ms ({100 * proof.gap:.2f} %)"
                f"{'; cut short' if proof.is_cut_short else ''}"
            )
            for table in json.loads(proof.json)["tables"]:
                if "next_best" in table:
                    other = table["next_best"]
                    others[table["name"]] = f"  next best {other['type']} {100 * other['dearer']:+.0f} %"
        for option in best_plan:
            ranks = [shard.rank for shard in option.shards]
            next_best = others.get(option.fqn.removeprefix("."), "")
            lines.append(f"{option.fqn:<40.40} {option.sharding_type:<17} {ranks}{next_best}")
            for shard in option.shards:
                seconds[shard.rank] = seconds.get(shard.rank, 0.0) + shard.perf.total
                held[shard.rank] = held.get(shard.rank, 0) + shard.storage.hbm + shard.storage.ddr
        lines += [f"rank {r:<5} {seconds[r]:10.4g} ms {held[r] / 1e9:10.4g} GB" for r in sorted(seconds)]
        logger.info("\n".join(lines))


class NoopEmbeddingStats(Stats):
    """Tell nothing."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Take what there is to tell, and leave it."""
