"""Formulas of `planner.estimator` say what torchrec 1.8.0's say, to the last digits."""

from __future__ import annotations

import random
from typing import TypeVar

import pytest
import torch
from two_sides import SIDES

CUTS = {"table_wise": "device", "column_wise": "device", "row_wise": "uniform", "table_row_wise": "host"}
CUTS |= {"table_column_wise": "host", "grid_shard": "multi_host", "data_parallel": "uniform"}
PARTS = ("fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "prefetch_compute", "input_dist_comms")
NAMES = ("annotations", "config", "estimator", "types")


def hardware(side, which):
    """Return a configuration of one's own, as programs for either project write it."""
    notes, types = (
        side("distributed.planner.estimator.annotations"),
        side("distributed.planner.estimator.types"),
    )
    if which == "default":
        return side("distributed.planner.estimator").EmbeddingPerfEstimatorConfig()
    if which == "plain":
        return types.HardwarePerfConfig()

    @notes.hbm_mem_bw(1e9)
    @notes.device_bw(5e8, device="cuda", compute_kernel=["fused", "fused_uvm_caching"])
    @notes.device_bw(3e8)
    @notes.use_min_dim_for_lookup(False)
    @notes.use_block_usage_penalty(True)
    @notes.use_bytes_for_input_read_size(False)
    @notes.input_data_type_size(4.0)
    class Hardware(types.HardwarePerfConfig):
        name = "ours"
        _bwd_compute_multiplier = 3.0

        @notes.fwd_coefficient(sharding_type=["table_wise", "row_wise"])
        def there(self):
            return types.PerfCoefficient(0.5, 2.0, 1.5, 0.25)

        @notes.bwd_coefficient(sharding_type="row_wise")
        def back(self):
            return types.PerfCoefficient(1.0, 3.0, 0.5, 0.125)

        @notes.prefetch_coefficient()
        def ahead(self):
            return types.PrefetchCoefficients(1e-6, 2e-6, 3e-9)

        @notes.fwd_comms(sharding_type="grid_shard")
        def rows(self, ctx):
            return 7.0 * ctx.emb_dim

        @notes.output_write_size("column_wise")
        def written(self, ctx, is_fwd=True):
            return ctx.batch_outputs * (2.0 if is_fwd else 3.0)

        @notes.backward_compute
        def zeal(self, ctx):
            return 1.0 * ctx.hash_size

    if which == "no backward":
        del Hardware.zeal
    return Hardware()


def option(side, cut, seed):
    """Return one option of a table whose numbers only the seed decides."""
    types, pick = side("distributed.planner.types"), random.Random(seed)
    rows, dim = pick.choice([100, 5000, 1_000_000]), pick.choice([8, 32, 64, 128, 256])
    features = pick.randint(1, 3)
    lengths = [pick.choice([0.5, 1.0, 20.0]) for _ in range(features)]
    poolings = [pick.choice([1.0, 2.0]) for _ in range(features)] if pick.random() < 0.5 else None
    kernel = pick.choice(["fused", "dense", "fused_uvm", "fused_uvm_caching"])
    cache = None
    if kernel == "fused_uvm_caching":
        stats = CacheStats(1000.0 * pick.randint(1, 9))
        cache = side("distributed.types").CacheParams(load_factor=0.3, stats=stats)
    dtype = pick.choice([torch.float32, torch.float16])
    weighted = pick.choice([None, False, True])
    is_pooled = pick.random() < 0.7
    made = types.ShardingOption(
        name="t",
        tensor=torch.empty(rows, dim, dtype=dtype, device="meta"),
        module=("m", torch.nn.Module()),
        input_lengths=lengths,
        batch_size=pick.choice([64, 1024]),
        sharding_type=cut,
        partition_by=CUTS[cut],
        compute_kernel=kernel,
        shards=[types.Shard(size=[rows // k, dim // 2], offset=[0, 0]) for k in (1, 3)],
        cache_params=cache,
        is_pooled=is_pooled,
    )
    made.num_poolings, made.is_weighted = poolings, weighted
    return made


class CacheStats:
    """Say how often a cache misses."""

    def __init__(self, lookups):
        self.expected_lookups = lookups
        self.cacheability = 0.5

    def expected_miss_rate(self, clf):
        return 1 - clf


def perfs(side, cut, seed, which, **flags):
    planner = side("distributed.planner.types")
    world, local = random.Random(seed).choice([(1, 1), (4, 4), (16, 8), (32, 8)])
    topology = planner.Topology(world_size=world, compute_device="cuda", local_world_size=local)
    estimators = side("distributed.planner.estimator")
    if which == "default":
        made = estimators.EmbeddingPerfEstimatorFactory.create(
            "DEFAULT_estimator", topology=topology, **flags
        )
    else:
        made = estimators.EmbeddingPerfEstimatorFactory.create_with_config(
            hardware(side, which), topology=topology, **flags
        )
    one = option(side, cut, seed)
    sizes = {"POOLED_EMBEDDINGS_ALL_TO_ALL": (2, 1), "POOLED_EMBEDDINGS_REDUCE_SCATTER": (1, 2)}
    data = planner.SharderData(
        fused_params={"prefetch_pipeline": seed % 2 == 0},
        qcomm_dtype_sizes=sizes if seed % 3 == 0 else {},
        storage_usage_type=None,
    )
    made.estimate([one], {one.module_type_key: data})
    return [[getattr(shard.perf, part) for part in PARTS] for shard in one.shards]


@pytest.mark.parametrize("which", ["default", "plain", "annotated", "no backward"])
@pytest.mark.parametrize("cut", CUTS)
def test_the_same_milliseconds(cut, which):
    for seed in range(40):
        flags = {"is_inference": seed % 5 == 0, "use_batch_inputs_for_expected_cache_fetches": seed % 4 == 0}
        flags["use_linear_regression_prefetch_estimate"] = (
            which in ("annotated", "no backward") and seed % 7 == 0
        )
        ours, theirs = (perfs(side, cut, seed, which, **flags) for side in SIDES)
        assert [pytest.approx(one, rel=1e-12) for one in theirs] == ours, (seed, cut, which)


@pytest.mark.parametrize("name", NAMES)
def test_no_public_name_is_missing(name):
    ours, theirs = (side(f"distributed.planner.estimator.{name}") for side in SIDES)
    for word, value in vars(theirs).items():
        if not word.startswith("_") and callable(value) and value.__module__ == theirs.__name__:
            assert hasattr(ours, word) or isinstance(value, TypeVar), word


def test_the_same_is_refused():
    for side in SIDES:
        factory = side("distributed.planner.estimator").EmbeddingPerfEstimatorFactory
        assert factory.is_registered("default_estimator") and not factory.is_registered("nobody")
        with pytest.raises(ValueError, match="nobody"):
            factory.create("nobody", topology=None)
        with pytest.raises(ValueError, match="topology"):
            factory.create("default_estimator")
        notes = side("distributed.planner.estimator.annotations")

        class Few(side("distributed.planner.estimator").HardwarePerfConfig):
            pass

        few = notes.supported_sharding_types("table_wise")(Few)()
        few.validate_sharding_type("TABLE_WISE")
        with pytest.raises(ValueError, match="row_wise"):
            few.validate_sharding_type("row_wise")
