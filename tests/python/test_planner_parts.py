"""Planners with parts of one's own: torchrec's loop over proposals, and the parts that come with it."""

from __future__ import annotations

import itertools
import math

import pytest
import tessera._C
import torch
from tessera.modules.embedding_configs import EmbeddingBagConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection
from torch import nn

if not hasattr(tessera._C, "planner"):
    pytest.skip("the library was built without the planner", allow_module_level=True)
from tessera.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from tessera.distributed.planner._search import search_plan
from tessera.distributed.planner.constants import kernel_bw_lookup
from tessera.distributed.planner.enumerators import EmbeddingEnumerator, calculate_shard_sizes_and_offsets
from tessera.distributed.planner.partitioners import (
    GreedyPerfPartitioner,
    MemoryBalancedPartitioner,
    SortBy,
)
from tessera.distributed.planner.perf_models import NoopPerfModel
from tessera.distributed.planner.planners import (
    to_sharding_plan,
    validate_compute_kernels,
    validate_modules_inclusion_in_sharding_plan,
    validate_rank_assignment,
)
from tessera.distributed.planner.proposers import (
    CertifiedProposer,
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
    proposers_to_proposals_list,
)
from tessera.distributed.planner.shard_estimators import (
    EmbeddingOffloadStats,
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
    calculate_shard_storages,
)
from tessera.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    Partitioner,
    Perf,
    PerfModel,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    Proposer,
    Shard,
    ShardEstimator,
    ShardingOption,
    Stats,
    Storage,
    TopologyFactory,
    TrainerConfig,
)
from tessera.distributed.planner.utils import BinarySearchPredicate, LuusJaakolaSearch
from tessera.distributed.sharding_plan import get_default_sharders
from tessera.distributed.types import CacheParams

ENVIRONMENT = {"TESSERA_PROFILE": "assume"}
GIB = 1024**3
TABLES = {"a": (100_000, 64), "b": (20_000, 32), "c": (1000, 64)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.sparse = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"{name}_feature"]
                )
                for name, (rows, dim) in TABLES.items()
            ],
        )
        self.dense = nn.Linear(64, 64)


def topology(world=4, device="cpu", **options):
    return Topology(world_size=world, compute_device=device, **options)


def space(where=None, constraints=None):
    enumerator = EmbeddingEnumerator(where or topology(), batch_size=512, constraints=constraints)
    return enumerator, enumerator.enumerate(Model(), get_default_sharders())


def option(name, sharding, shards, module="m"):
    places = {"table_wise": "device", "column_wise": "device", "row_wise": "uniform"}
    places |= {"table_row_wise": "host", "table_column_wise": "host", "grid_shard": "multi_host"}
    return ShardingOption(
        name, torch.empty(8, 8, device="meta"), (module, nn.Module()), [1.0], 4, sharding, places[sharding],
        "fused", [Shard([8, 8], [0, 0], Storage(0, size), Perf(time, 0, 0, 0)) for size, time in shards],
    )  # fmt: skip


def test_every_way_is_listed_with_its_costs():
    _, options = space()
    kinds = {(o.name, o.sharding_type, o.compute_kernel) for o in options}
    assert ("a", "row_wise", "fused") in kinds and ("a", "data_parallel", "dense") in kinds
    assert not any(kind[1] == "grid_shard" for kind in kinds)
    for one in options:
        assert all(shard.perf.total > 0 and shard.storage.ddr > 0 for shard in one.shards)
        if one.sharding_type not in ("data_parallel",):
            covered = sum(rows * columns for rows, columns in (shard.size for shard in one.shards))
            assert covered == math.prod(TABLES[one.name])
    _, few = space(constraints={"a": ParameterConstraints(sharding_types=["grid_shard"], min_partition=16)})
    (grid, _) = [o for o in few if o.name == "a"]
    assert len(grid.shards) == 4 * 4 and grid.partition_by == "multi_host"


def test_cuts_have_torchrecs_sizes():
    table = torch.empty(10, 20, device="meta")
    assert calculate_shard_sizes_and_offsets(table, 4, 2, "row_wise") == (
        [[3, 20], [3, 20], [3, 20], [1, 20]],
        [[0, 0], [3, 0], [6, 0], [9, 0]],
    )
    assert calculate_shard_sizes_and_offsets(table, 4, 2, "column_wise", 10) == (
        [[10, 10], [10, 10]],
        [[0, 0], [0, 10]],
    )
    assert calculate_shard_sizes_and_offsets(table, 4, 2, "grid_shard", 10)[1] == [
        [0, 0], [5, 0], [0, 10], [5, 10],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'diagonal' is not one of"):
        calculate_shard_sizes_and_offsets(table, 4, 2, "diagonal")


def test_greedy_goes_on_with_the_table_that_has_most_bytes():
    _, options = space()
    proposer = GreedyProposer()
    proposer.load(options)
    first = proposer.propose()
    assert [o.name for o in first] == ["a", "b", "c"]
    for one in first:
        longest = max(shard.perf.total for shard in one.shards)
        others = [o for o in options if o.name == one.name]
        assert longest == min(max(s.perf.total for s in o.shards) for o in others)
    proposer.feedback(partitionable=True)
    second = proposer.propose()
    largest = max(first, key=lambda o: (max(s.storage.ddr for s in o.shards), o.total_storage.ddr))
    assert [x.name for x, y in zip(first, second, strict=True) if x is not y] == [largest.name]
    count = 2
    while proposer.propose():
        proposer.feedback(partitionable=False)
        count += 1
    # Every step takes one option; nobody is stepped after its last.
    assert count - 2 == sum(len([o for o in options if o.name == n]) - 1 for n in TABLES)


def test_a_greedy_proposer_with_a_threshold_ends_when_nothing_helps():
    _, options = space()
    proposer = GreedyProposer(threshold=2)
    proposer.load(options)
    for rating in (5.0, 6.0, 7.0, 8.0):
        assert proposer.propose() is not None
        proposer.feedback(partitionable=True, perf_rating=rating)
    assert proposer.propose() is None


def test_uniform_grid_and_their_lists():
    _, options = space()
    listed = proposers_to_proposals_list([UniformProposer()], options)
    kinds = [{o.sharding_type for o in proposal} for proposal in listed]
    assert all(len(kind) == 1 for kind in kinds)
    assert {kind for (kind,) in kinds} == {o.sharding_type for o in options}
    per_table = [len([o for o in options if o.name == name]) for name in TABLES]
    everything = proposers_to_proposals_list([GridSearchProposer()], options)
    assert len(everything) == math.prod(per_table)
    assert proposers_to_proposals_list([GridSearchProposer(max_proposals=3)], options) == []


def test_dynamic_programming_finds_the_fastest_for_its_memory():
    _, options = space(topology(2))
    proposer = DynamicProgrammingProposer(hbm_bins_per_device=50)
    proposer.load(options)
    assert [o.total_storage.ddr for o in proposer.propose()] == [
        min(o.total_storage.ddr for o in options if o.name == name)
        for name in sorted(TABLES, key=lambda n: min(o.total_storage.ddr for o in options if o.name == n))
    ]
    room = topology(2, ddr_cap=64 * 1024**2)
    proposer.feedback(partitionable=True, storage_constraint=room)
    best = math.inf
    while proposal := proposer.propose():
        best = min(best, sum(o.total_perf for o in proposal))
        proposer.feedback(partitionable=True, storage_constraint=room)
    tables = [[o for o in options if o.name == name] for name in TABLES]
    sums = [
        sum(o.total_perf for o in chosen)
        for chosen in itertools.product(*tables)
        if sum(o.total_storage.ddr for o in chosen) < 2 * 64 * 1024**2
    ]
    assert best == pytest.approx(min(sums))


def test_greedy_partitioner_fills_the_rank_that_has_least_to_do():
    proposal = [
        option("big", "table_wise", [(50, 4.0)]),
        option("rows", "row_wise", [(10, 1.0), (10, 1.0)]),
        option("small", "table_wise", [(20, 1.0)]),
        option("cut", "column_wise", [(30, 2.0), (30, 2.0)]),
    ]
    laid = GreedyPerfPartitioner().partition(proposal, topology(2, ddr_cap=100))
    assert laid is proposal
    # Most bytes first: cut's halves go to both ranks, big to either, small to the other.
    assert [s.rank for s in proposal[3].shards] == [0, 1]
    assert proposal[0].shards[0].rank == 0 and proposal[2].shards[0].rank == 1
    with pytest.raises(PlannerError, match="the rank with most room has") as caught:
        GreedyPerfPartitioner().partition(proposal, topology(2, ddr_cap=70))
    assert caught.value.error_type == PlannerErrorType.PARTITION


def test_hosts_get_whole_tables():
    proposal = [
        option("x", "table_row_wise", [(10, 1.0), (10, 1.0)]),
        option("y", "table_column_wise", [(10, 1.0), (10, 2.0)]),
        option("z", "grid_shard", [(1, 1.0)] * 4),
    ]
    where = topology(4, ddr_cap=25, local_world_size=2)
    GreedyPerfPartitioner(SortBy.PERF).partition(proposal, where)
    for one in proposal[:2]:
        assert len({shard.rank // 2 for shard in one.shards}) == 1
    assert {s.rank // 2 for s in proposal[0].shards} != {s.rank // 2 for s in proposal[1].shards}
    assert sorted(s.rank for s in proposal[2].shards) == [0, 1, 2, 3]
    with pytest.raises(PlannerError, match="not a multiple of the 2 ranks"):
        GreedyPerfPartitioner().partition([option("z", "grid_shard", [(1, 1.0)] * 3)], where)
    with pytest.raises(PlannerError, match=r"no host has room for m\.x"):
        GreedyPerfPartitioner().partition([option("x", "table_row_wise", [(30, 1.0)] * 2)], where)


def test_memory_is_balanced_within_the_tolerance():
    sizes = [(90, 1.0), (80, 1.0), (10, 1.1), (10, 1.1)]
    megabytes = [(size * 1024**2, time) for size, time in sizes]
    proposal = []
    for i, (size, time) in enumerate(megabytes):
        one = option(f"t{i}", "table_wise", [(0, time)])
        one.shards[0].storage = Storage(size, 0)
        proposal.append(one)
    where = topology(2, "cuda", hbm_cap=GIB)
    greedy = GreedyPerfPartitioner(SortBy.PERF).partition(proposal, where)
    before = NoopPerfModel(where).rate(greedy)
    MemoryBalancedPartitioner(tolerance=0.2).partition(proposal, where)
    held = [0, 0]
    for one in proposal:
        held[one.shards[0].rank] += one.shards[0].storage.hbm
    assert max(held) <= 100 * 1024**2
    assert NoopPerfModel(where).rate(proposal) <= 1.2 * before


class OneRank(Partitioner):
    def partition(self, proposal, storage_constraint):
        for one in proposal:
            for i, shard in enumerate(one.shards):
                shard.rank = i if one.partition_by == "uniform" else storage_constraint.world_size - 1
        return proposal


class Whole(Proposer):
    def load(self, search_space, enumerator=None):
        self.given = [
            o for o in search_space if o.sharding_type == "table_wise" and o.compute_kernel == "fused"
        ]
        self.heard = []

    def propose(self):
        return self.given if not self.heard else None

    def feedback(self, partitionable, plan=None, perf_rating=None, storage_constraint=None):
        self.heard.append((partitionable, perf_rating))


class Flat(PerfModel):
    def rate(self, plan):
        return 7.0


def test_parts_of_ones_own_are_called_as_torchrec_calls_them():
    seen = []

    class Mine(Stats):
        def log(self, **given):
            seen.append(given)

    proposer = Whole()
    planner = EmbeddingShardingPlanner(
        topology=topology(),
        proposer=proposer,
        partitioner=OneRank(),
        performance_model=Flat(),
        stats=Mine(),
    )
    plan = planner.plan(Model(), get_default_sharders())
    assert {s.placement.rank() for t in plan.plan["sparse"].values() for s in t.sharding_spec.shards} == {3}
    assert proposer.heard == [(True, 7.0)]
    assert planner.last_result is None
    (given,) = seen
    assert (given["num_proposals"], given["num_plans"]) == (1, 1)
    assert given["debug_stats"].planner_type == "EmbeddingShardingPlanner"


def test_the_loop_is_no_faster_than_the_bound():
    ours = EmbeddingShardingPlanner(topology=topology(), debug=False)
    ours.plan(Model())
    seen = []
    loop = EmbeddingShardingPlanner(
        topology=topology(),
        proposer=[GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer(), CertifiedProposer()],
        callbacks=[lambda options: seen.append(options) or options],
        debug=False,
    )
    loop.plan(Model())
    rated = NoopPerfModel(topology()).rate(seen[0])
    assert rated >= 1e3 * ours.last_result.bound_seconds * (1 - 1e-9)
    assert rated <= 1e3 * ours.last_result.plan_seconds * 1.5


def test_nothing_that_fits_is_an_error_that_says_what_is_needed():
    small = topology(2, ddr_cap=8_000_000)
    planner = EmbeddingShardingPlanner(topology=small, partitioner=GreedyPerfPartitioner(), debug=False)
    with pytest.raises(
        PlannerError, match=r"(?s)none of \d+ proposals fits.*The last error: partition:"
    ) as caught:
        planner.plan(Model(), get_default_sharders())
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


def test_time_that_is_up_gives_the_best_so_far(caplog):
    class Endless(Whole):
        def propose(self):
            return self.given

    planner = EmbeddingShardingPlanner(
        topology=topology(), proposer=Endless(), timeout_seconds=0.2, debug=False
    )
    planner.plan(Model(), get_default_sharders())
    assert "cut short" in caplog.text


def test_estimators_of_ones_own():
    class Ones(ShardEstimator):
        def estimate(self, sharding_options, sharder_map=None):
            for one in sharding_options:
                for shard in one.shards:
                    shard.perf, shard.storage = Perf(1, 0, 0, 0), Storage(0, 1)

    enumerator = EmbeddingEnumerator(topology(), 512, estimator=Ones())
    planner = EmbeddingShardingPlanner(topology=topology(), enumerator=enumerator, debug=False)
    plan = planner.plan(Model(), get_default_sharders())
    validate_modules_inclusion_in_sharding_plan(plan, Model(), get_default_sharders())


def test_a_search_by_any_costs_finds_what_trying_all_finds():
    import itertools
    import random

    def best_of_all(options, world, room):
        by_table = {}
        for one in options:
            by_table.setdefault(one.name, []).append(one)
        ways = []
        for alike in by_table.values():
            ways.append([])
            for one in alike:
                count = len(one.shards)
                if one.partition_by == "uniform":
                    ways[-1].append((one, range(world)))
                else:
                    ways[-1] += [(one, ranks) for ranks in itertools.product(range(world), repeat=count)]
        best = float("inf")
        for chosen in itertools.product(*ways):
            times, sizes = [0.0] * world, [0] * world
            for one, ranks in chosen:
                for shard, rank in zip(one.shards, ranks, strict=True):
                    times[rank] += shard.perf.total
                    sizes[rank] += shard.storage.ddr
            if max(sizes) <= room:
                best = min(best, max(times))
        return best

    num_best = 0
    for seed in range(30):
        pick, options, room = random.Random(seed), [], 30
        for name in "abcd":
            time, size = pick.randint(1, 30), pick.randint(2, 18)
            options.append(option(name, "table_wise", [(size, time)]))
            options.append(option(name, "column_wise", [(size // 2, time * 0.55)] * 2))
            options.append(option(name, "row_wise", [(size // 2, time * 0.7)] * 2))
        ranks = topology(2, ddr_cap=room)
        best, found = best_of_all(options, 2, room), search_plan(options, ranks, tries=32)
        if best == float("inf"):
            assert found is None
            continue
        if found is None:  # it may miss a plan where memory is tight
            continue
        rated = NoopPerfModel(ranks).rate(found)
        assert rated >= best - 1e-9
        num_best += rated <= best + 1e-9
        used = [0, 0]
        for one in found:
            for shard in one.shards:
                used[shard.rank] += shard.storage.ddr
        assert max(used) <= room and [one.name for one in found] == list("abcd")
        again = search_plan(options, ranks, tries=32)
        assert [[s.rank for s in one.shards] for one in again] == [
            [s.rank for s in one.shards] for one in found
        ]
    assert num_best >= 24, num_best


def test_a_search_ends_when_its_work_is_done_and_says_so(caplog):
    options = []
    for name in "abcdefgh":
        options.append(option(name, "table_wise", [(1, 3 + ord(name) % 5)]))
        options.append(option(name, "column_wise", [(1, 2 + ord(name) % 3)] * 2))
    ranks = topology(2, ddr_cap=100)
    asked = []

    def never():
        asked.append(1)
        return False

    whole = search_plan(options, ranks, tries=64, is_late=never)
    assert len(asked) > 10 and "cut short" not in caplog.text
    # Nothing is left to do: every table is laid, and nothing is changed any more.
    first = search_plan(options, ranks, tries=0)
    assert [one.name for one in first] == list("abcdefgh") and "cut short" in caplog.text
    caplog.clear()
    late = search_plan(options, ranks, tries=64, is_late=lambda: True)
    assert "effort='high' tries more" in caplog.text
    rating = NoopPerfModel(ranks)
    assert rating.rate(whole) <= rating.rate(first) == rating.rate(late)


def test_plans_that_were_kept():
    class Kept(PlanLoader):
        def __init__(self, options, made_for=None):
            self.options, self.made_for = options, made_for

        def load(self):
            return {o.storage_hash(): o for o in self.options}

        def plan_context_hash(self):
            return self.made_for

    best = []
    maker = EmbeddingShardingPlanner(
        topology=topology(), proposer=GreedyProposer(), debug=False,
        callbacks=[lambda options: best.append(options) or options],
    )  # fmt: skip
    first = maker.plan(Model(), get_default_sharders())
    made_for = maker.hash_planner_context_inputs_str()
    again = EmbeddingShardingPlanner(
        topology=topology(), plan_loader=Kept(best[0], made_for), debug=False
    ).plan(Model(), get_default_sharders())
    assert str(first) == str(again)
    with pytest.raises(PlannerError) as caught:
        EmbeddingShardingPlanner(
            topology=topology(), batch_size=64, plan_loader=Kept(best[0], made_for), debug=False
        ).plan(Model(), get_default_sharders())
    assert caught.value.error_type == PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH
    strange = option("zz", "table_wise", [(1, 1.0)])
    with pytest.raises(PlannerError, match=r"has m.zz, which nothing here") as caught:
        EmbeddingShardingPlanner(
            topology=topology(), plan_loader=Kept([*best[0], strange]), debug=False
        ).plan(Model(), get_default_sharders())
    assert caught.value.error_type == PlannerErrorType.PLAN_LOADING_FAILED


def test_plans_are_checked():
    _, options = space()
    whole = [o for o in options if o.sharding_type == "table_wise" and o.compute_kernel == "fused"]
    with pytest.raises(PlannerError, match="has no rank"):
        to_sharding_plan(whole, topology())
    OneRank().partition(whole, topology())
    plan = to_sharding_plan(whole, topology())
    with pytest.raises(PlannerError, match=r"shard on rank 3; there are 2") as caught:
        validate_rank_assignment(plan, topology(2))
    assert caught.value.error_type == PlannerErrorType.INVALID_RANK_ASSIGNMENT
    del plan.plan["sparse"]["b"]
    with pytest.raises(PlannerError, match=r"sparse\.b of the model missing") as caught:
        validate_modules_inclusion_in_sharding_plan(plan, Model(), get_default_sharders())
    assert caught.value.error_type == PlannerErrorType.MISSING_MODULE_IN_PLAN
    whole[0].compute_kernel = "magic"
    with pytest.raises(PlannerError, match="the kernel 'magic', which is none") as caught:
        validate_compute_kernels(whole)
    assert caught.value.error_type == PlannerErrorType.INVALID_COMPUTE_KERNEL


def test_caches_grow_by_how_much_they_help():
    stats = EmbeddingOffloadStats(0.5, 1000, torch.tensor([8.0, 4.0, 2.0, 2.0]), 100_000)
    assert stats.expected_miss_rate(0.0) == 1.0
    assert stats.expected_miss_rate(1.0) == 0.0
    assert stats.expected_miss_rate(0.5) == pytest.approx(0.25)
    constraints = {
        "a": ParameterConstraints(
            compute_kernels=["fused_uvm_caching"], cache_params=CacheParams(load_factor=0.1, stats=stats)
        )
    }
    where = topology(1, "cuda", hbm_cap=GIB)
    enumerator = EmbeddingEnumerator(where, 512, constraints)
    cached = option("a", "table_wise", [(0, 1.0)], "sparse")
    cached._tensor, cached._module = torch.empty(100_000, 64, device="meta"), ("sparse", Model().sparse)
    cached.shards = [Shard([100_000, 64], [0, 0])]
    cached.compute_kernel, cached.cache_params = "fused_uvm_caching", constraints["a"].cache_params
    enumerator.populate_estimates([cached])
    small = cached.total_storage
    assert small.ddr >= 100_000 * 64 * 4
    proposer = EmbeddingOffloadScaleupProposer()
    proposer.load([cached], enumerator)
    sizes = []
    for _ in range(6):
        proposal = proposer.propose()
        if proposal is None:
            break
        sizes.append(proposal[0].total_storage.hbm)
        rating = sum(o.total_perf for o in proposal)
        proposer.feedback(True, proposal, rating, where)
    assert sizes[0] == small.hbm and len(sizes) > 2 and max(sizes[1:]) > small.hbm
    assert cached.cache_params.load_factor == 0.1  # the user's own is left alone


def test_published_formulas_of_storage():
    sharder = get_default_sharders()[0]
    storages = calculate_shard_storages(
        sharder, "table_wise", torch.empty(100, 16, device="meta"), "cuda", "fused", [[100, 16]], [8], 2, 2,
        [3.0], [1.0], 0.2, True,
    )  # fmt: skip
    # Weights; ids of both ranks; a row a sample of both.
    assert storages == [Storage(100 * 16 * 4 + 2 * 8 * 3 * 8 + 2 * 8 * 16 * 4, 0)]
    weights = EmbeddingStorageEstimator(topology(2), is_inference=True)
    one = option("t", "table_wise", [(0, 0.0)])
    weights.estimate([one])
    assert one.shards[0].storage == Storage(0, 8 * 8 * 4)
    EmbeddingPerfEstimator(topology(2), is_inference=True).estimate([one])
    assert one.shards[0].perf.bwd_compute == 0 and one.shards[0].perf.fwd_compute > 0
    assert kernel_bw_lookup("cuda", "fused_uvm", 9.0, 8.0, 5.0) == 0.5
    assert kernel_bw_lookup("cpu", "fused_uvm", 9.0, 8.0, 5.0) is None
    with pytest.raises(ValueError, match="at least one bin"):
        EmbeddingOffloadStats(0.5, 10, torch.empty(0), 10)


def test_searches():
    search, asked = BinarySearchPredicate(0, 100, 0), []
    value = search.next(True)
    while value is not None:
        asked.append(value)
        value = search.next(value <= 37)
    assert max(v for v in asked if v <= 37) == 37
    walk = LuusJaakolaSearch(0.0, 10.0, max_iterations=60)
    value = walk.next(0.0)
    while value is not None:
        value = walk.next((value - 3.0) ** 2)
    assert abs(walk.best()[0] - 3.0) < 0.5
    assert LuusJaakolaSearch(0.0, 0.0, 5).next(0.0) == 0.0


def test_topologies_from_configurations():
    made = TopologyFactory.create_topology(
        TrainerConfig(world_size=16, local_world_size=8, hbm_cap_bytes=5 * GIB),
        HardwareConfig(hbm_cap_bytes=9 * GIB, ddr_cap_bytes=7 * GIB, inter_host_bw=4.0),
        KernelConfig(compute_device="cuda", use_hardware_based_bandwidth=True),
    )
    assert (made.world_size, made.local_world_size, made.inter_host_bw) == (16, 8, 4.0)
    assert made.devices[3].storage.hbm == 5 * GIB and made.devices[3].storage.ddr == 7 * GIB
    with pytest.raises(ValueError, match="world_size is missing"):
        TopologyFactory.create_topology(TrainerConfig())
    with pytest.raises(ValueError, match="pods of 9 ranks"):
        TopologyFactory.create_topology(TrainerConfig(world_size=8, pod_size=9))
    with pytest.raises(ValueError, match="'tpu' is not one of"):
        TopologyFactory.create_topology(TrainerConfig(world_size=8), None, KernelConfig("tpu"))
    assert HardwareConfig(ddr_mem_bw=0).get_validation_issues() == ["ddr_mem_bw is 0, not more than nothing"]


PROFILE = """{"kind": "tessera machine profile", "machine": "test", "version": "1", "engine": "shm",
 "ranks": 2, "threads_per_rank": 1, "spread": 0,
 "curves": {"rows": [[64, 2e-8], [1024, 1e-7]], "host": [[1000, 1e-5], [1000000, 1e-3]]}}"""


def test_a_measured_machine_is_used_and_what_is_given_wins(tmp_path, monkeypatch):
    kept = tmp_path / "machine.json"
    kept.write_text(PROFILE)
    monkeypatch.setenv("TESSERA_PROFILE", str(kept))

    def seconds(where):
        planner = EmbeddingShardingPlanner(topology=where, debug=False)
        planner.plan(Model())
        return planner.last_result

    measured = seconds(topology())
    monkeypatch.setenv("TESSERA_PROFILE", "assume")
    assumed = seconds(topology())
    assert measured.plan_seconds > assumed.plan_seconds
    assert '"row_seconds"' in measured.problem and '"row_seconds"' not in assumed.problem
    given = {"ddr_mem_bw": 1e6, "intra_host_bw": 1e6, "inter_host_bw": 1e6}
    plain = seconds(topology(**given)).problem
    monkeypatch.setenv("TESSERA_PROFILE", str(kept))
    assert seconds(topology(**given)).problem == plain
    kept.write_text("{}")
    with pytest.raises(ValueError, match="profile"):
        seconds(topology())
