"""tessera.distributed.planner: torchrec's names, our planner, and one plan on all ranks."""

from __future__ import annotations

import json
import time

import pytest
import tessera._C
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torch import nn

if not hasattr(tessera._C, "planner"):
    pytest.skip("the library was built without the planner", allow_module_level=True)
from tessera.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from tessera.distributed.planner.proposers import UniformProposer
from tessera.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from tessera.distributed.planner.types import (
    CustomTopologyData,
    Perf,
    PlannerError,
    PlannerErrorType,
    Stats,
    Storage,
)

ENVIRONMENT = {"TESSERA_PROFILE": "assume"}
GIB = 1024**3


def bags(*tables):
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"{name}_feature"]
            )
            for name, rows, dim in tables
        ],
    )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.sparse = nn.ModuleDict(
            {
                "bags": bags(("a", 100_000, 64), ("b", 20_000, 32), ("c", 1000, 64)),
                "rows": EmbeddingCollection(
                    device=torch.device("meta"),
                    tables=[
                        EmbeddingConfig(name="d", num_embeddings=500, embedding_dim=16, feature_names=["d"])
                    ],
                ),
            }
        )
        self.dense = nn.Linear(64, 64)


def planner(world=4, **options):
    topology = options.pop("topology", None) or Topology(world_size=world, compute_device="cpu")
    return EmbeddingShardingPlanner(topology=topology, **options)


def shards_of(plan, path, table):
    return [
        (*s.shard_offsets, *s.shard_sizes, s.placement.rank())
        for s in plan.plan[path][table].sharding_spec.shards
    ]


def test_all_tables_of_all_modules_are_planned_and_proven():
    ours = planner()
    plan = ours.plan(Model())
    assert set(plan.plan) == {"sparse.bags", "sparse.rows"}
    assert set(plan.plan["sparse.bags"]) == {"a", "b", "c"}
    for name, rows, dim in (("a", 100_000, 64), ("b", 20_000, 32), ("c", 1000, 64)):
        covered = sum(s[2] * s[3] for s in shards_of(plan, "sparse.bags", name))
        assert covered == rows * dim
    result = ours.last_result
    assert 0 < result.bound_seconds <= result.plan_seconds
    assert result.gap == pytest.approx(result.plan_seconds / result.bound_seconds - 1)
    result.check()
    assert "sparse.bags.a" in result.explain("sparse.bags.a")


def many(count=60):
    sizes = [(f"t{i}", 100_000 * (1 + i % 7), 8 * (1 + i % 4)) for i in range(count)]
    return nn.ModuleDict({"bags": bags(*sizes)})


def test_time_that_is_up_gives_the_best_so_far(caplog):
    # What is left of a gap takes the search of high effort far longer than this.
    hurried = planner(16, timeout_seconds=0.2, effort="high", debug=False)
    hurried.plan(many())
    result = hurried.last_result
    assert result.is_cut_short and json.loads(result.json)["cut_short"]
    assert "plan: cut short after 0.2 s" in caplog.text
    result.check()
    # It is explained as it is, not as a plan with more time would be.
    assert "; cut short\n" in result.explain()
    caplog.clear()
    calm = planner(timeout_seconds=600, debug=False)
    calm.plan(Model())
    assert not calm.last_result.is_cut_short and "cut short" not in caplog.text


def test_statistics_tell_bound_gap_and_next_best(caplog):
    caplog.set_level("INFO")
    ours = planner()
    ours.plan(Model())
    lines = caplog.text.splitlines()
    result = ours.last_result
    told = f"ms a step, no plan can be under {1e3 * result.bound_seconds:.4g} ms ({100 * result.gap:.2f} %)"
    assert sum(told in line for line in lines) == 1
    for table in json.loads(result.json)["tables"]:
        (line,) = [line for line in lines if line.startswith(f"{table['name']} ")]
        if "next_best" in table:
            other = table["next_best"]
            assert line.endswith(f"next best {other['type']} {100 * other['dearer']:+.0f} %")
        else:
            assert "next best" not in line


def test_constraints_have_torchrecs_names():
    constraints = {
        "a": ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[30.0]),
        "b": ParameterConstraints(sharding_types=["column_wise"], min_partition=16),
        "c": ParameterConstraints(sharding_types=["data_parallel"], compute_kernels=["dense"]),
    }
    plan = planner(constraints=constraints).plan(Model())
    tables = plan.plan["sparse.bags"]
    assert tables["a"].sharding_type == "row_wise"
    assert [s[2] for s in shards_of(plan, "sparse.bags", "a")] == [25_000] * 4
    assert tables["b"].sharding_type == "column_wise"
    assert all(s[3] >= 16 for s in shards_of(plan, "sparse.bags", "b"))
    assert (tables["c"].sharding_type, tables["c"].compute_kernel) == ("data_parallel", "dense")


def test_tables_lie_apart_and_together():
    ours = planner(apart=[["a", "b"]], together=[["b", "sparse.bags.c"]])
    plan = ours.plan(Model())
    ranks = {name: {s[4] for s in shards_of(plan, "sparse.bags", name)} for name in "abc"}
    assert not ranks["a"] & ranks["b"]
    assert ranks["b"] == ranks["c"] and len(ranks["b"]) == 1
    ours.last_result.check()
    with pytest.raises(PlannerError, match="apart names 'nobody'"):
        planner(apart=[["a", "nobody"]]).plan(Model())
    with pytest.raises(ValueError, match="apart and together are the engine's"):
        planner(apart=[["a", "b"]], proposer=UniformProposer())


def test_kernels_keep_the_name_that_was_asked_for():
    constraints = {"a": ParameterConstraints(compute_kernels=["fused_uvm_caching"])}
    plan = planner(constraints=constraints).plan(Model())
    assert plan.plan["sparse.bags"]["a"].compute_kernel == "fused_uvm_caching"
    constraints = {"a": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["dense"])}
    plan = planner(constraints=constraints).plan(Model())
    assert plan.plan["sparse.bags"]["a"].compute_kernel == "dense"
    assert plan.plan["sparse.bags"]["a"].sharding_type == "table_wise"


@pytest.mark.parametrize(
    ("constraints", "kind", "text"),
    [
        ({"zz": ParameterConstraints()}, PlannerErrorType.INPUT_VALIDATION, "constraints for zz"),
        (
            {"a": ParameterConstraints(pooling_factors=[1, 2])},
            PlannerErrorType.INPUT_VALIDATION,
            "'a' has 1 features",
        ),
        (
            {"a": ParameterConstraints(sharding_types=["nonsense"])},
            PlannerErrorType.STRICT_CONSTRAINTS,
            "its sharder offers",
        ),
        (
            {"a": ParameterConstraints(device_group="cuda")},
            PlannerErrorType.STRICT_CONSTRAINTS,
            "may lie on cuda only",
        ),
    ],
)
def test_constraints_that_cannot_be_are_named(constraints, kind, text):
    with pytest.raises(PlannerError, match=text) as caught:
        planner(constraints=constraints).plan(Model())
    assert caught.value.error_type == kind


def test_too_little_memory_says_what_would_suffice():
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=8_000_000)
    with pytest.raises(PlannerError, match=r"(?s)fits no rank .* 2 parts.*try: \d+ ranks, or") as caught:
        planner(topology=topology).plan(Model())
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


def test_memory_of_single_ranks():
    data = CustomTopologyData({"ddr_cap": [GIB, 0, GIB, 0]}, world_size=4)
    topology = Topology(world_size=4, compute_device="cpu", custom_topology_data=data)
    plan = planner(topology=topology).plan(Model())
    for path, tables in plan.plan.items():
        for name in tables:
            assert {s[4] for s in shards_of(plan, path, name)} <= {0, 2}
    with pytest.raises(ValueError, match="has 2 numbers, and there are 4 ranks"):
        CustomTopologyData({"ddr_cap": [1, 2]}, world_size=4)


def test_reservations():
    topology = Topology(world_size=2, compute_device="cuda", hbm_cap=10_000_000)
    model, sharders = Model(), []
    assert topology.devices[0].storage == Storage(10_000_000, 128 * GIB, 2048 * GIB)
    fixed = FixedPercentageStorageReservation(0.25).reserve(topology, 1, model, sharders)
    assert fixed.devices[1].storage.hbm == 7_500_000
    fixed = FixedAbsoluteStorageReservation(1000).reserve(topology, 1, model, sharders)
    assert fixed.devices[1].storage.hbm == 9_999_000
    heuristic = HeuristicalStorageReservation(0.1)
    from tessera.distributed.sharding_plan import get_default_sharders

    left = heuristic.reserve(topology, 1, model, get_default_sharders())
    assert left.devices[0].storage.hbm == 9_000_000 - 6 * 4 * (64 * 64 + 64)
    assert heuristic.last_reserved_topology.devices[0].storage == left.devices[0].storage
    assert topology.devices[0].storage.hbm == 10_000_000
    with pytest.raises(ValueError, match="not a share"):
        FixedPercentageStorageReservation(15)


def test_costs_add_up_and_statistics_of_ones_own_are_called():
    seen = []

    class Mine(Stats):
        def log(self, **given):
            seen.append(given)

    ours = planner(stats=Mine())
    ours.plan(Model())
    (given,) = seen
    totals = [0.0] * 4
    for option in given["best_plan"]:
        assert option.num_shards == len(option.shards)
        for shard in option.shards:
            totals[shard.rank] += shard.perf.total
    assert max(totals) == pytest.approx(1e3 * ours.last_result.plan_seconds)
    assert given["batch_size"] == 512
    assert Perf(1, 2, 3, 4) + Perf(1, 1, 1, 1) == Perf(2, 3, 4, 5)
    both = Perf(1, 2, 3, 4, 50, 6) + Perf(0, 0, 0, 0, 1, 2)
    assert (both.input_dist_comms, both.prefetch_compute, both.total) == (51, 8, 18)
    assert Storage(1, 2).fits_in(Storage(1, 2)) and not Storage(2, 0).fits_in(Storage(1, 9))


def _collective(rank, batch_sizes):
    topology = Topology(world_size=len(batch_sizes), compute_device="cpu")
    ours = EmbeddingShardingPlanner(topology=topology, batch_size=batch_sizes[rank], debug=False)
    return str(ours.collective_plan(Model()))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_get_the_same_plan(world):
    plans = run_ranks(world, _collective, [512] * world)
    assert len(set(plans)) == 1


def test_a_rank_that_was_given_something_else_is_named_everywhere():
    outcomes = run_ranks_collecting(4, _collective, [512, 512, 256, 512])
    texts = {outcome.error for outcome in outcomes}
    assert texts == {
        "PlannerError: collective_plan: rank 2 was given other batch size than rank 0. "
        "Give all ranks the same."
    }


def _seconds_until_refused(rank, batch_sizes):
    times = []
    for _ in range(4):
        dist.barrier()
        begin = time.monotonic()
        with pytest.raises(PlannerError):
            _collective(rank, batch_sizes)
        times.append(time.monotonic() - begin)
    return min(times)


def test_a_rank_that_was_given_something_else_is_named_within_a_second():
    assert max(run_ranks(4, _seconds_until_refused, [512, 512, 256, 512])) < 1
