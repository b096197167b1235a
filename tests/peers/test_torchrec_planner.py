"""Proposers and partitioners propose and lay what torchrec 1.8.0's do."""

from __future__ import annotations

import random

import pytest
import torch
from two_sides import SIDES

PLACES = {"table_wise": "device", "column_wise": "device", "row_wise": "uniform", "table_row_wise": "host"}
PLACES |= {"table_column_wise": "host", "grid_shard": "multi_host"}
WORLD, LOCAL = 4, 2
SHARDS = {"table_wise": 1, "column_wise": 3, "row_wise": WORLD, "table_row_wise": LOCAL}
SHARDS |= {"table_column_wise": 2, "grid_shard": WORLD}


def space(side, seed):
    """Return options of a few tables with numbers that only the seed decides."""
    types, pick, options = side("distributed.planner.types"), random.Random(seed), []
    for table in range(pick.randint(2, 4)):
        for cut in pick.sample(list(PLACES), pick.randint(1, 4)):
            size, time = pick.randint(1, 30), pick.random()
            shards = [
                types.Shard(
                    size=[4, 4],
                    offset=[0, i],
                    storage=types.Storage(hbm=size * 2**20, ddr=0),
                    perf=types.Perf(fwd_compute=time, fwd_comms=0.1, bwd_compute=time / 2, bwd_comms=0),
                )
                for i in range(SHARDS[cut])
            ]
            options.append(
                types.ShardingOption(
                    name=f"t{table}",
                    tensor=torch.empty(4, 4, device="meta"),
                    module=("m", torch.nn.Module()),
                    input_lengths=[1.0],
                    batch_size=8,
                    sharding_type=cut,
                    partition_by=PLACES[cut],
                    compute_kernel="fused",
                    shards=shards,
                    is_pooled=True,
                )
            )
    return options


def topology(side):
    return side("distributed.planner.types").Topology(
        world_size=WORLD, compute_device="cuda", hbm_cap=60 * 2**20, local_world_size=LOCAL
    )


def proposals(side, name, seed):
    """Return the options of every proposal, and the ranks that the two partitioners give it."""
    parts = side("distributed.planner.partitioners")
    error = side("distributed.planner.types").PlannerError
    proposer, found = getattr(side("distributed.planner.proposers"), name)(), []
    proposer.load(search_space=space(side, seed))
    while (proposal := proposer.propose()) and len(found) < 200:
        ranks = []
        for partitioner in (
            parts.GreedyPerfPartitioner(),
            parts.GreedyPerfPartitioner(sort_by=parts.SortBy.PERF, balance_modules=True),
            parts.MemoryBalancedPartitioner(),
        ):
            try:
                laid = partitioner.partition(proposal, topology(side))
                ranks.append([[shard.rank for shard in option.shards] for option in laid])
            except error:
                ranks.append(None)
        found.append(([(o.name, o.sharding_type) for o in proposal], ranks))
        proposer.feedback(partitionable=ranks[0] is not None, storage_constraint=topology(side))
    return found


@pytest.mark.parametrize("name", ["GreedyProposer", "UniformProposer", "GridSearchProposer"])
def test_the_same_is_proposed_and_laid(name):
    for seed in range(25):
        ours, theirs = (proposals(side, name, seed) for side in SIDES)
        assert ours == theirs, (name, seed)


def test_dynamic_programming_ends_as_fast():
    for seed in range(25):
        best = []
        for side in SIDES:
            proposer = side("distributed.planner.proposers").DynamicProgrammingProposer(20)
            proposer.load(search_space=space(side, seed))
            times = []
            while proposal := proposer.propose():
                times.append(sum(option.total_perf for option in proposal))
                proposer.feedback(partitionable=True, storage_constraint=topology(side))
            best.append(min(times))
        assert best[0] == pytest.approx(best[1]), seed
