"""Plans by hand and the types around them; what they mean to tables is in test_embeddingbag.py."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tessera.distributed import types
from tessera.distributed.sharding_plan import (
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_sharding_constructor_from_type,
    grid_shard,
    plan_from_json,
    plan_to_json,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tessera.distributed.types import (
    CacheParams,
    ModuleSharder,
    NoOpQuantizedCommCodec,
    ParameterSharding,
    QuantizedCommCodec,
    QuantizedCommCodecs,
    ShardingPlan,
    ShardingType,
    get_tensor_size_bytes,
)
from torch import nn


def placements(wish, rows, columns, device_type="cpu"):
    shards = wish(torch.empty(rows, columns), 2, 4, device_type).sharding_spec.shards
    return [str(shard.placement) for shard in shards]


def test_parts_of_columns_may_lie_on_devices_of_different_types():
    assert placements(column_wise([3, 0]), 2, 4) == ["rank:3/cpu", "rank:0/cpu"]
    mixed = column_wise([3, 0], device_types=["meta", "cpu"])
    assert placements(mixed, 2, 4) == ["rank:3/meta", "rank:0/cpu"]
    assert placements(column_wise(size_per_rank=[1, 3], device_types=["cpu", "meta"]), 2, 4, "meta") == [
        "rank:0/cpu",
        "rank:1/meta",
    ]
    with pytest.raises(ValueError, match="there are 1 device_types for 2 parts"):
        column_wise([3, 0], device_types=["cpu"])


def test_arguments_that_mean_something_else_are_refused():
    with pytest.raises(
        ValueError, match=r"row_wise: num_buckets is for torchrec's virtual tables\. Leave it out"
    ):
        row_wise(num_buckets=4)
    with pytest.raises(ValueError, match=r"states of sharded tables are ShardedTensors; output_dtensor"):
        types.ShardingEnv(2, 0, output_dtensor=True)


def boxes(wish, rows, columns, local_size=2, world_size=4):
    sharding = wish(torch.empty(rows, columns), local_size, world_size, "cpu")
    shards = sharding.sharding_spec.shards
    assert sharding.ranks == [shard.placement.rank() for shard in shards]
    return [(*s.shard_offsets, *s.shard_sizes, s.placement.rank()) for s in shards]


def test_every_wish_gives_its_boxes():
    assert boxes(table_wise(2), 10, 4) == [(0, 0, 10, 4, 2)]
    assert boxes(row_wise(), 10, 4) == [(0, 0, 3, 4, 0), (3, 0, 3, 4, 1), (6, 0, 3, 4, 2), (9, 0, 1, 4, 3)]
    assert [box[2] for box in boxes(row_wise(), 5, 4)] == [2, 2, 1, 0]
    assert [box[2] for box in boxes(row_wise(([0, 1, 2, 2], "cpu")), 5, 4)] == [0, 1, 2, 2]
    assert boxes(column_wise([3, 0]), 2, 5) == [(0, 0, 2, 3, 3), (0, 3, 2, 2, 0)]
    assert boxes(column_wise(size_per_rank=[1, 4]), 2, 5) == [(0, 0, 2, 1, 0), (0, 1, 2, 4, 1)]
    assert boxes(table_row_wise(1), 3, 4) == [(0, 0, 2, 4, 2), (2, 0, 1, 4, 3)]
    assert boxes(table_column_wise([3, 2]), 2, 4) == [(0, 0, 2, 2, 3), (0, 2, 2, 2, 2)]
    assert boxes(grid_shard([1, 0]), 2, 4) == [
        (0, 0, 1, 2, 2),
        (1, 0, 1, 2, 3),
        (0, 2, 1, 2, 0),
        (1, 2, 1, 2, 1),
    ]
    replicas = data_parallel()(torch.empty(3, 2), 2, 4)
    assert replicas == ParameterSharding("data_parallel", "dense", [0, 1, 2, 3])
    for kind in ShardingType:
        assert get_sharding_constructor_from_type(kind).__name__ == kind.value


def test_ranks_share_the_gpus_there_are(monkeypatch):
    def place():
        return str(table_wise(3)(torch.empty(3, 2), 2, 4, "cuda").sharding_spec.shards[0].placement)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # planned elsewhere: one for each rank
    assert place() == "rank:3/cuda:1"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, expected in ((8, "rank:3/cuda:1"), (1, "rank:3/cuda:0")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert place() == expected


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(10, 4))
        self.b = nn.Parameter(torch.zeros(6, 8))


class PairSharder(ModuleSharder[Pair]):
    module_type = Pair

    def shard(self, module, params, env, device=None):
        raise NotImplementedError

    def compute_kernels(self, sharding_type, compute_device_type):
        return ["dense"]


def test_a_module_is_planned_table_by_table():
    def plan(wishes, sharder=None):
        return construct_module_sharding_plan(
            Pair(), wishes, sharder or PairSharder(), local_size=2, world_size=2, device_type="cpu"
        )

    made = plan({"a": table_wise(1, compute_kernel="fused"), "b": row_wise()})
    assert (made["a"].compute_kernel, made["b"].compute_kernel) == ("fused", "dense")
    assert plan(apply_to_all(Pair(), row_wise(), PairSharder()))["a"].ranks == [0, 1]
    for wishes, text in [
        ({"a": row_wise()}, "nothing is said about table 'b'"),
        ({"a": row_wise(), "b": row_wise(), "c": row_wise()}, "there is no table 'c'"),
        ({"a": table_wise(2), "b": row_wise()}, "table 'a', table_wise: there is no rank 2 among 2"),
    ]:
        with pytest.raises(ValueError, match=text):
            plan(wishes)
    with pytest.raises(ValueError, match="there is no sharder for Linear"):
        construct_module_sharding_plan(nn.Linear(1, 1), {})
    with pytest.raises(ValueError, match="a sharder of Pair cannot shard Linear"):
        construct_module_sharding_plan(nn.Linear(1, 1), {}, PairSharder())
    with pytest.raises(ValueError, match="'quick' is not one of dense, fused"):
        table_wise(0, compute_kernel="quick")
    with pytest.raises(ValueError, match="give ranks or size_per_rank"):
        column_wise()


def test_plans_go_to_json_and_back():
    wishes = {"a": column_wise([1, 0]), "b": data_parallel()}
    tables = construct_module_sharding_plan(Pair(), wishes, PairSharder(), 2, 2, "cpu")
    plan = ShardingPlan({"over.pair": tables})
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    assert plan_to_json(plan_from_json(text)) == text
    assert plan_to_json(pickle.loads(pickle.dumps(plan))) == text
    assert copy.deepcopy(plan) == plan
    assert str(plan).startswith("module: over.pair\ntable  type")
    with pytest.raises(ValueError, match=r"/modules/m/t/type is \"rows\", which is unknown"):
        plan_from_json('{"version": 1, "modules": {"m": {"t": {"type": "rows", "kernel": "fused",'
                       ' "ranks": [], "shards": []}}}}')  # fmt: skip
    bare = ShardingPlan({"m": {"t": ParameterSharding("row_wise", "fused")}})
    with pytest.raises(ValueError, match="table 't' has neither a sharding_spec nor a size"):
        plan_to_json(bare)


def test_codecs_round_trip_with_a_context():
    values = torch.rand(40)
    for name in ("fp32", "fp16", "bf16", "int8", "fp8"):
        codec = QuantizedCommCodec(name)
        ctx = codec.create_context()
        wire = codec.encode(values, ctx)
        assert wire.dtype == codec.quantized_dtype
        assert wire.numel() == codec.calc_quantized_size(40, ctx)
        torch.testing.assert_close(codec.decode(wire, ctx), values, rtol=0.07, atol=2 / 255)
    whole_rows = QuantizedCommCodec("int8")
    assert whole_rows.decode(whole_rows.encode(torch.rand(64))).numel() == 64
    nothing = NoOpQuantizedCommCodec()
    assert nothing.encode(values) is values
    assert nothing.decode(values) is values
    assert nothing.create_context() is None
    assert QuantizedCommCodecs().forward.comm_precision == "fp32"


def test_small_types():
    assert get_tensor_size_bytes(torch.empty(3, 2, dtype=torch.float16)) == 12
    assert {kind.value for kind in types.ParameterStorage} == {"hbm", "ddr"}
    assert hash(CacheParams(load_factor=0.5)) == hash(CacheParams(load_factor=0.5, stats=object()))
    sharder = PairSharder()
    assert sharder.sharding_types("cpu") == ["data_parallel"]
    assert sharder.storage_usage(torch.empty(4, 4), "cuda", "dense") == {"hbm": 64}
    assert sharder.storage_usage(torch.empty(4, 4), "cpu", "dense") == {"ddr": 64}
    with pytest.raises(ValueError, match="'tpu' is not one of"):
        sharder.storage_usage(torch.empty(1), "tpu", "dense")
    with pytest.raises(NotImplementedError, match="'x' cannot be set"):
        types.NullShardedModuleContext().x = 1
    types.NullShardingContext().record_stream(None)


class Doubling(types.ShardedModule):
    def create_context(self):
        return []

    def input_dist(self, ctx, x):
        ctx.append("input")
        return types.NoWait(types.NoWait(x))

    def compute(self, ctx, dist_input):
        ctx.append("compute")
        return 2 * dist_input

    def output_dist(self, ctx, output):
        assert ctx == ["input", "compute"]
        return types.LazyNoWait(output)


def test_a_sharded_module_takes_the_steps_in_order():
    module = Doubling()
    assert (module(torch.ones(2)) + 1).tolist() == [3.0, 3.0]
    assert module.qcomm_codecs_registry == {}
    assert list(module.sharded_parameter_names("p")) == []
