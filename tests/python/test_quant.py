"""Quantised tables in Python: modules, lookups, and shards on the devices of one process."""

from __future__ import annotations

import contextlib
import copy
import pathlib
import threading

import pytest
import torch
from tessera import _C
from tessera.distributed._infer_lookups import look_up_beside_each_other
from tessera.distributed.embedding_lookup import (
    InferGroupedEmbeddingsLookup,
    InferGroupedPooledEmbeddingsLookup,
    MetaInferGroupedEmbeddingsLookup,
    MetaInferGroupedPooledEmbeddingsLookup,
)
from tessera.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    KJTList,
    ShardedEmbeddingTable,
)
from tessera.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
    create_infer_embedding_bag_sharding,
    flatten_feature_lengths,
)
from tessera.distributed.types import ParameterSharding, ShardingEnv
from tessera.inference.modules import quantize_embeddings
from tessera.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.feature_processor_ import PositionWeightedModule
from tessera.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from tessera.quant import embedding_modules as quant
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn

TYPES = [torch.qint8, torch.quint4x2, torch.quint2x4, torch.float16, torch.bfloat16, torch.float32]
LOOSE = {
    torch.qint8: 0.02, torch.quint4x2: 0.3, torch.quint2x4: 1.5, torch.float16: 2e-3, torch.bfloat16: 0.02,
    torch.float32: 1e-6,
}  # fmt: skip


def float_module(is_weighted=False) -> EmbeddingBagCollection:
    torch.manual_seed(3)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(num_embeddings=20, embedding_dim=16, name="a", feature_names=["f", "g"]),
            EmbeddingBagConfig(
                num_embeddings=9, embedding_dim=8, name="b", feature_names=["h"], pooling=PoolingType.MEAN
            ),
            EmbeddingBagConfig(num_embeddings=33, embedding_dim=8, name="c", feature_names=["i"]),
        ],
        is_weighted=is_weighted,
    )


def batch(is_weighted=False) -> KeyedJaggedTensor:
    """Features in another order than the tables', empty bags among them."""
    generator = torch.Generator().manual_seed(4)
    keys, rows = ["i", "f", "h", "g"], [33, 20, 9, 20]
    lengths = torch.randint(0, 5, (4, 6), generator=generator)
    ids = [
        torch.randint(0, count, (int(own.sum()),), generator=generator)
        for count, own in zip(rows, lengths, strict=True)
    ]
    values = torch.cat(ids)
    weights = torch.rand(len(values), generator=generator) if is_weighted else None
    return KeyedJaggedTensor.from_lengths_sync(keys, values, lengths.flatten(), weights)


def quantised(dtype=torch.qint8, split=False, is_weighted=False) -> quant.EmbeddingBagCollection:
    module = float_module(is_weighted)
    if split:
        quant.quant_prep_enable_quant_state_dict_split_scale_bias(module)
    return quantize_embeddings(module, dtype, inplace=True)


def rounded_copy(module) -> EmbeddingBagCollection:
    """The float module with the numbers that the quantised one holds."""
    plain = float_module(module.is_weighted())
    with torch.no_grad():
        for name, bag in plain.embedding_bags.items():
            tbe, place = module._whole_rows(name)
            bag.weight.copy_(tbe.dequantised(place))
    return plain


def assert_same(found, wanted, **close):
    assert set(found.keys()) == set(wanted.keys())
    for key in wanted.keys():  # noqa: SIM118  (not a dictionary)
        torch.testing.assert_close(found[key], wanted[key], **close)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_collection_pools_the_rounded_rows(dtype, is_weighted):
    module = quantised(dtype, is_weighted=is_weighted)
    found = module(batch(is_weighted))
    with torch.no_grad():
        exact = rounded_copy(module)(batch(is_weighted))
        trained = float_module(is_weighted)(batch(is_weighted))
    assert_same(found, exact, rtol=1e-5, atol=1e-5)
    assert_same(found, trained, rtol=0, atol=LOOSE[dtype])


def test_rows_of_uint8_are_those_of_int8():
    rounded = []
    for dtype in (torch.uint8, torch.qint8):
        plain = float_module()
        plain.qconfig = quant.QuantConfig.of(dtype)
        rounded.append(quant.EmbeddingBagCollection.from_float(plain))
    assert [config.data_type for config in rounded[0].embedding_bag_configs()] == [DataType.INT8] * 3
    states = [module.state_dict() for module in rounded]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(rows, states[1][name]) for name, rows in states[0].items())


def test_a_model_is_changed_in_place_or_copied():
    model = nn.Sequential(nn.Identity(), nn.Sequential(float_module()))
    other = quantize_embeddings(
        model,
        torch.qint8,
        inplace=False,
        output_dtype=torch.float16,
        per_table_weight_dtype={"b": torch.quint4x2},
    )
    assert type(model[1][0]) is EmbeddingBagCollection
    own = other[1][0]
    assert type(own) is quant.QuantEmbeddingBagCollection
    assert [c.data_type for c in own.embedding_bag_configs()] == [DataType.INT8, DataType.INT4, DataType.INT8]
    assert own(batch()).values().dtype == torch.float16
    assert quantize_embeddings(model, torch.qint8, inplace=True) is model
    assert type(model[1][0]) is quant.QuantEmbeddingBagCollection


def test_keys_and_shapes_of_the_state():
    state = quantised().state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "embedding_bags.a.weight": (20, 32),  # 16 codes, scale and bias, to 16 bytes
        "embedding_bags.b.weight": (9, 16),
        "embedding_bags.c.weight": (33, 16),
    }
    state = quantised(split=True).state_dict()
    assert tuple(state["embedding_bags.a.weight"].shape) == (20, 16)
    for name in ("weight_qscale", "weight_qbias"):
        assert tuple(state[f"embedding_bags.a.{name}"].shape) == (20, 1)
        assert state[f"embedding_bags.a.{name}"].dtype == torch.float16
    assert list(quantised(torch.float16, split=True).state_dict()) == [
        "embedding_bags.a.weight",
        "embedding_bags.c.weight",
        "embedding_bags.b.weight",
    ]


@pytest.mark.parametrize("split", [False, True])
def test_a_state_is_loaded_into_the_rows(split):
    source, target = quantised(split=split), quantised(split=split)
    for tensor in target.state_dict().values():
        tensor.zero_()
    assert target(batch()).values().abs().sum() == 0
    target.load_state_dict({name: t.clone() for name, t in source.state_dict().items()})
    assert torch.equal(target(batch()).values(), source(batch()).values())
    wrong = source.state_dict() | {"embedding_bags.a.weight": torch.zeros(20, 99, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match=r"\[20, 99\].*\[20, \d\d\]"):
        target.load_state_dict(wrong)


def test_a_copy_has_rows_of_its_own():
    module = quantised()
    copied = copy.deepcopy(module)
    before = module(batch()).values()
    for tensor in copied.state_dict().values():
        tensor.zero_()
    assert torch.equal(module(batch()).values(), before)
    assert copied(batch()).values().abs().sum() == 0


def test_what_cannot_be_rounded_is_named():
    module = float_module()
    with torch.no_grad():
        module.embedding_bags["c"].weight[7, 3] = float("nan")
    with pytest.raises(ValueError, match="row 7 of table 'c'"):
        quantize_embeddings(module, torch.qint8, inplace=False)
    with pytest.raises(ValueError, match="no qconfig"):
        quant.EmbeddingBagCollection.from_float(float_module())
    with pytest.raises(ValueError, match=r"\['z'\]"):
        quantize_embeddings(float_module(), torch.qint8, True, per_table_weight_dtype={"z": torch.qint8})
    with pytest.raises(ValueError, match="CPU"):
        quant.EmbeddingBagCollection(float_module().embedding_bag_configs(), False, torch.device("meta"))
    with pytest.raises(ValueError, match=r"no features \['h'\]"):
        features = batch()
        quantised()(features.permute([features.keys().index(key) for key in ("i", "f", "g")]))


def test_single_rows():
    torch.manual_seed(1)
    tables = [
        EmbeddingConfig(num_embeddings=20, embedding_dim=8, name="a", feature_names=["f", "g"]),
        EmbeddingConfig(num_embeddings=9, embedding_dim=8, name="b", feature_names=["h"]),
    ]
    plain = EmbeddingCollection(tables=tables, need_indices=True)
    module = quantize_embeddings(
        plain,
        torch.qint8,
        inplace=False,
        additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: quant.EmbeddingCollection},
    )
    found, wanted = module(batch()), plain(batch())
    assert list(found) == list(wanted)
    for key, own in wanted.items():
        torch.testing.assert_close(found[key].values(), own.values().detach(), rtol=0, atol=0.02)
        assert torch.equal(found[key].lengths(), own.lengths())
        assert torch.equal(found[key].weights().long(), own.weights().long())


# ---- The faults of the reference, one by one (docs/deviations.md)

PLANS = {
    "table_wise": {name: ParameterSharding("table_wise", "quant", [int(name != "b")]) for name in "abc"},
    "row_wise": {name: ParameterSharding("row_wise", "quant") for name in "abc"},
    "column_wise": {name: ParameterSharding("column_wise", "quant", [1, 0]) for name in "abc"},
    "two_parts_on_one_device": {n: ParameterSharding("column_wise", "quant", [1, 1]) for n in "abc"},
    "mixed": {
        "a": ParameterSharding("column_wise", "quant", [0, 2]),
        "b": ParameterSharding("row_wise", "quant"),
        "c": ParameterSharding("table_wise", "quant", [2]),
    },
}  # fmt: skip


def sharded_of(module, plan, world_size=3, fused_params=None):
    env = ShardingEnv.from_local(world_size, 0)
    return QuantEmbeddingBagCollectionSharder(fused_params).shard(module, PLANS[plan], env)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sharded_equals_unsharded_without_a_group_or_a_loaded_state(plan, dtype, is_weighted):
    """Devices of the CPU need no switch, rows and columns no group, and shard copies the rows."""
    module = quantised(dtype, is_weighted=is_weighted)
    sharded = sharded_of(module, plan)
    assert_same(sharded(batch(is_weighted)), module(batch(is_weighted)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("split", [False, True])
def test_every_sharding_has_both_forms_of_the_state(plan, split):
    module = quantised(torch.quint4x2, split=split)
    sharded = sharded_of(module, plan)
    state = sharded.state_dict()
    wanted = module.state_dict()
    assert set(state) == set(wanted)
    assert all(torch.equal(state[name], own) for name, own in wanted.items())
    other = quantised(torch.quint4x2, split=split)
    for own in other.state_dict().values():
        own.zero_()
    again = sharded_of(other, plan)
    assert again(batch()).values().abs().sum() == 0
    again.load_state_dict(state)
    assert_same(again(batch()), module(batch()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("bad", [-1, 33, 2**40])
def test_an_id_outside_is_named_and_never_row_0(plan, bad):
    features = batch()
    values = features.values().clone()
    values[2] = bad  # the first feature is "i"
    wrong = KeyedJaggedTensor.from_lengths_sync(features.keys(), values, features.lengths())
    for module in (quantised(), sharded_of(quantised(), plan)):
        with pytest.raises(
            IndexError, match=rf"table 'c' has 33 rows; id {bad} at position 2 of feature 'i'"
        ):
            module(wrong)


def test_the_mean_over_shards_of_rows_is_that_of_the_whole_bag():
    tables = [EmbeddingBagConfig(4, 2, "t", DataType.FP32, feature_names=["f"], pooling=PoolingType.MEAN)]
    numbers = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [10.0, 20.0]])
    module = quant.EmbeddingBagCollection(tables, False, table_name_to_weights={"t": numbers})
    plan = {"t": ParameterSharding("row_wise", "quant")}
    sharded = QuantEmbeddingBagCollectionSharder().shard(module, plan, ShardingEnv.from_local(2, 0))
    features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([0, 1, 3, 3]), torch.tensor([3, 0, 1]))
    torch.testing.assert_close(
        sharded(features)["f"], torch.tensor([[14 / 3, 26 / 3], [0.0, 0.0], [10.0, 20.0]])
    )


def test_steps_of_a_sharded_module():
    module = quantised()
    sharded = sharded_of(module, "mixed")
    ctx = sharded.create_context()
    inputs = sharded.input_dist(ctx, batch())
    assert len(inputs) == 3
    outputs = sharded.compute(ctx, inputs)
    assert_same(sharded.output_dist(ctx, outputs), module(batch()), rtol=1e-5, atol=1e-5)
    assert set(sharded.sharding_type_to_sharding_infos()) == {"column_wise", "row_wise", "table_wise"}
    assert set(sharded.shardings) == {"column_wise", "row_wise", "table_wise"}
    configs = sharded.tbes_configs()
    assert sum(len(config.embedding_tables) for config in configs.values()) == 6
    assert all(isinstance(tbe, quant.IntNBitTableBatchedEmbeddingBagsCodegen) for tbe in configs)
    copied = sharded.copy(torch.device("cpu"))
    for tbe in sharded.tbes_configs():
        for table in range(len(tbe.embedding_specs)):
            tbe.rows(table).zero_()
    assert_same(copied(batch()), module(batch()), rtol=1e-5, atol=1e-5)


def test_a_copy_is_on_the_same_devices_or_refused(monkeypatch):
    sharded = sharded_of(quantised(), "mixed")
    assert sharded.copy(torch.device("cpu", 0)) is not sharded
    with pytest.raises(ValueError, match="the tables lie on cpu; shard the module on cuda:1"):
        sharded.copy(torch.device("cuda:1"))
    # GPUs that are not there: the rows stay where they are, and only what is said of them changes.
    for own, results, others in [
        ("cuda", "cuda:0", ["cuda:1", "cpu"]),  # shard i on cuda:i, results on the first
        ("cuda:1", "cuda:1", ["cuda:0", "cuda", "cpu"]),
    ]:
        monkeypatch.setattr(sharded, "_device", torch.device(own))
        assert_same(sharded.copy(torch.device(results))(batch()), quantised()(batch()), rtol=1e-5, atol=1e-5)
        for other in others:
            text = f"the tables lie on {own}; shard the module on {other}\\."
            with pytest.raises(ValueError, match=text):
                sharded.copy(torch.device(other))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("split", [False, True])
def test_the_storage_of_a_table_is_the_bytes_of_its_rows(dtype, split):
    """Scale and bias are counted once, wherever the state has them."""
    module = quantised(dtype, split=split)
    sharder = QuantEmbeddingBagCollectionSharder()
    for name, table in sharder.shardable_parameters(module).items():
        tbe, place = module._whole_rows(name)
        assert sharder.storage_usage(table, "cpu", "quant") == {"ddr": tbe.rows(place).numel()}


def test_plans_that_cannot_be():
    env = ShardingEnv.from_local(2, 0)
    sharder = QuantEmbeddingBagCollectionSharder()
    good = {name: ParameterSharding("table_wise", "quant", [0]) for name in "abc"}
    with pytest.raises(ValueError, match="Sharding type not supported grid_shard"):
        create_infer_embedding_bag_sharding("grid_shard", [], env)
    with pytest.raises(ValueError, match="table 'b' has no sharding"):
        sharder.shard(quantised(), {name: good[name] for name in "ac"}, env)
    with pytest.raises(ValueError, match="'c' has a shard on device 5 of 2"):
        sharder.shard(quantised(), good | {"c": ParameterSharding("table_wise", "quant", [5])}, env)
    thirds = {name: ParameterSharding("column_wise", "quant", [0, 1, 0]) for name in "abc"}
    with pytest.raises(ValueError, match="share a byte"):
        sharder.shard(quantised(torch.quint4x2), thirds, env)
    with pytest.raises(ValueError, match="CPU"):
        sharder.shard(quantised(), good, env, torch.device("meta"))
    assert sharder.module_type is quant.QuantEmbeddingBagCollection
    assert sharder.sharding_types("cpu") == ["table_wise", "row_wise", "column_wise"]
    assert sharder.compute_kernels("table_wise", "cpu") == ["quant"]


@pytest.mark.parametrize("plan", ["table_wise", "column_wise", "two_parts_on_one_device"])
def test_features_get_their_weights_on_each_device(plan):
    processors = {name: PositionWeightedModule(5) for name in "fghi"}
    for number, processor in enumerate(processors.values()):
        processor.position_weight.data = torch.arange(5.0) / (number + 1)
    plain = FeatureProcessedEmbeddingBagCollection(float_module(is_weighted=True), processors)
    plain.qconfig = quant.QuantConfig.of(torch.qint8)
    module = quant.FeatureProcessedEmbeddingBagCollection.from_float(plain)
    with torch.no_grad():
        assert_same(module(batch()), plain(batch()), rtol=0, atol=0.1)
    sharder = QuantFeatureProcessedEmbeddingBagCollectionSharder()
    env = ShardingEnv.from_local(2, 0)
    sharded = sharder.shard(module, PLANS[plan], env)
    assert_same(sharded(batch()), module(batch()), rtol=1e-5, atol=1e-5)
    assert sharder.sharding_types("cpu") == ["table_wise", "column_wise"]
    state = sharded.state_dict()
    assert set(state) == set(module.state_dict())
    sharded.load_state_dict(state)
    assert_same(sharded(batch()), module(batch()), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="row_wise"):
        sharder.shard(module, PLANS["row_wise"], env)


# ---- Lookups of the devices


def grouped(names, pooling=PoolingType.SUM, dim=8) -> GroupedEmbeddingConfig:
    tables = [
        ShardedEmbeddingTable(
            10, dim, name, DataType.INT8, feature_names=[f"f_{name}"], local_rows=10, local_cols=dim
        )
        for name in names
    ]
    return GroupedEmbeddingConfig(DataType.INT8, pooling, False, False, EmbeddingComputeKernel.QUANT, tables)


def features_of(names) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        [f"f_{name}" for name in names],
        torch.arange(3 * len(names)) % 10,
        torch.tensor([2, 0, 1] * len(names)),
    )


def fill(lookup):
    """Numbers 0 to 9 in all columns of all tables; their scales hold them exactly."""
    for tbe in lookup.get_tbes_to_register():
        for table, (_, rows, dim, *_) in enumerate(tbe.embedding_specs):
            tbe.assign(table, torch.arange(rows).float().repeat_interleave(dim).view(rows, dim))


FP32 = {"output_dtype": torch.float32}


def test_a_pooled_lookup_of_one_device():
    lookup = MetaInferGroupedPooledEmbeddingsLookup(
        [grouped("ab"), grouped("c", PoolingType.MEAN)], fused_params=FP32
    )
    fill(lookup)
    out = lookup(features_of("abc"))
    assert out.shape == (3, 24)
    assert out[:, ::8].tolist() == [[1.0, 7.0, 6.5], [0.0, 0.0, 0.0], [2.0, 5.0, 8.0]]
    assert MetaInferGroupedPooledEmbeddingsLookup([grouped("a")])(features_of("a")).dtype == torch.float16
    assert list(lookup.state_dict()) == ["a.weight", "b.weight", "c.weight"]
    assert [name for name, _ in lookup.named_buffers("x")] == ["x.a.weight", "x.b.weight", "x.c.weight"]
    lookup.flush()
    lookup.purge()


def test_a_lookup_of_single_rows():
    lookup = MetaInferGroupedEmbeddingsLookup([grouped("ab")], fused_params=FP32)
    fill(lookup)
    out = lookup(features_of("ab"))
    assert out.shape == (6, 8)
    assert out[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    mixed = grouped("a")
    mixed.embedding_tables += grouped("b", dim=4).embedding_tables
    with pytest.raises(ValueError, match=r"one width, not \[4, 8\]"):
        MetaInferGroupedEmbeddingsLookup([mixed])


def test_lookups_of_several_devices_join_their_state():
    per_device = [[grouped("a")], [], [grouped("bc")]]
    lookup = InferGroupedPooledEmbeddingsLookup(per_device, 3, FP32)
    fill(lookup)
    parts = KJTList([features_of("a"), features_of("a"), features_of("bc")])
    found = lookup(parts)
    assert [tuple(part.shape) for part in found] == [(3, 8), (3, 16)]
    state = {name: rows.clone() for name, rows in lookup.state_dict().items()}
    assert list(state) == ["a.weight", "b.weight", "c.weight"]
    other = InferGroupedPooledEmbeddingsLookup(per_device, 3, FP32)
    keys = other.load_state_dict(state)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(other(parts), found, strict=True))
    with pytest.raises(RuntimeError, match=r"missing \['a.weight'\], unexpected \['z.weight'\]"):
        other.load_state_dict({("z.weight" if name == "a.weight" else name): t for name, t in state.items()})
    with pytest.raises(ValueError, match=r"\[10, 3\] in the state and \[10, 16\] here"):
        other.load_state_dict(state | {"a.weight": torch.zeros(10, 3, dtype=torch.uint8)})
    with pytest.raises(ValueError, match="for 2 devices, not for 3"):
        lookup(KJTList([features_of("a"), features_of("a")]))
    sequences = InferGroupedEmbeddingsLookup([[grouped("a")], [grouped("b")]], 2, FP32)
    fill(sequences)
    assert [tuple(p.shape) for p in sequences(KJTList([features_of("a"), features_of("b")]))] == [
        (3, 8),
        (3, 8),
    ]


class _Elsewhere:
    """A lookup of a GPU that is not there: both must be asked before one of them answers."""

    def __init__(self, number, barrier, error=None):
        self.device, self.barrier, self.error = torch.device("cuda", number), barrier, error

    def __call__(self, features):
        self.barrier.wait(30)
        if self.error:
            raise self.error
        return torch.full((1,), float(features))


def test_gpus_look_up_beside_each_other(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    barrier = threading.Barrier(2)
    found = look_up_beside_each_other([_Elsewhere(0, barrier), _Elsewhere(1, barrier)], [3, 4])
    assert [part.item() for part in found] == [3.0, 4.0]
    error = IndexError("table 'a' has 3 rows")
    with pytest.raises(IndexError, match="table 'a' has 3 rows"):
        look_up_beside_each_other([_Elsewhere(0, barrier), _Elsewhere(1, barrier, error)], [3, 4])


# ---- On a GPU: the bits of the CPU

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
# Several shards on one GPU, and one GPU for each.
GPUS = ["cuda:0", pytest.param("cuda", marks=pytest.mark.skipif(
    torch.cuda.device_count() < 3, reason="there are fewer than three GPUs here"))]  # fmt: skip


@NEEDS_GPU
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("ids_on", ["cpu", "cuda:0"])
def test_shards_on_gpus_have_the_bits_of_the_cpu(dtype, is_weighted, plan, device, ids_on):
    module = quantised(dtype, is_weighted=is_weighted)
    env = ShardingEnv.from_local(3, 0)
    sharded = QuantEmbeddingBagCollectionSharder().shard(module, PLANS[plan], env, torch.device(device))
    assert all(tbe.rows(0).is_cuda for tbe in sharded.tbes_configs())
    found = sharded(batch(is_weighted).to(torch.device(ids_on)))
    assert found.values().device == torch.device("cuda:0")
    wanted = sharded_of(module, plan)(batch(is_weighted))
    assert found.keys() == wanted.keys()
    assert torch.equal(found.values().cpu(), wanted.values())
    state = module.state_dict()
    assert all(torch.equal(rows.cpu(), state[name]) for name, rows in sharded.state_dict().items())


@NEEDS_GPU
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("device", GPUS)
def test_an_id_outside_is_named_on_gpus_too(plan, device):
    env = ShardingEnv.from_local(3, 0)
    sharded = QuantEmbeddingBagCollectionSharder().shard(quantised(), PLANS[plan], env, torch.device(device))
    features = batch()
    values = features.values().clone()
    values[2] = 33  # the first feature is "i"
    wrong = KeyedJaggedTensor.from_lengths_sync(features.keys(), values, features.lengths())
    with pytest.raises(IndexError, match=r"table 'c' has 33 rows; id 33 at position 2 of feature 'i'"):
        sharded(wrong.to(torch.device("cuda:0")))


@NEEDS_GPU
@pytest.mark.parametrize("plan", ["table_wise", "column_wise"])
def test_features_get_their_weights_on_gpus_too(plan):
    processors = {name: PositionWeightedModule(5) for name in "fghi"}
    for number, processor in enumerate(processors.values()):
        processor.position_weight.data = torch.arange(5.0) / (number + 1)
    plain = FeatureProcessedEmbeddingBagCollection(float_module(is_weighted=True), processors)
    plain.qconfig = quant.QuantConfig.of(torch.qint8)
    module = quant.FeatureProcessedEmbeddingBagCollection.from_float(plain)
    sharder = QuantFeatureProcessedEmbeddingBagCollectionSharder()
    sharded = sharder.shard(module, PLANS[plan], ShardingEnv.from_local(2, 0), torch.device("cuda:0"))
    found = sharded(batch().to(torch.device("cuda:0")))
    assert_same(
        found, {key: own.cuda() for key, own in module(batch()).to_dict().items()}, rtol=1e-5, atol=1e-5
    )


@NEEDS_GPU
def test_halves_on_a_gpu_are_those_of_the_cpu():
    made = {}
    for device in ("cpu", "cuda:0"):
        lookup = MetaInferGroupedPooledEmbeddingsLookup([grouped("ab")], torch.device(device))
        fill(lookup)
        made[device] = lookup(features_of("ab"))
        assert made[device].dtype == torch.float16
    assert torch.equal(made["cuda:0"].cpu(), made["cpu"])


def test_lengths_of_two_dimensions_become_one():
    features = features_of("ab")
    assert flatten_feature_lengths(features) is features


def test_the_kernel_object():
    tables = quant.IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", 3, 6, DataType.INT4, None), ("u", 2, 5, DataType.FP16, None)], row_alignment=1
    )
    numbers = torch.tensor([[0.0, 3, 6, 9, 12, 15], [1] * 6, [-5.0, 10, 0, 0, 0, 0]])
    tables.assign(0, numbers)
    assert torch.equal(tables.dequantised(0), numbers)
    codes, head = tables.split_embedding_weights()[0]
    assert (tuple(codes.shape), tuple(head.shape)) == ((3, 3), (3, 4))
    assert codes[0].tolist() == [0x30, 0x96, 0xFC]
    rows, none = tables.split_embedding_weights(split_scale_shifts=False)[0]
    assert (tuple(rows.shape), none) == ((3, 7), None)
    assert tuple(tables.split_embedding_weights()[1][0].shape) == (2, 10)
    with pytest.raises(ValueError, match="7 bytes"):
        tables.split_embedding_weights_with_scale_bias(2)
    assert _C.embedding.quantised_row_bytes("int2", 5) == 6
    with pytest.raises(ValueError, match="no row type 'int3'"):
        _C.embedding.quantised_row_bytes("int3", 5)
    with pytest.raises(ValueError, match="do not fit 2 features"):
        tables(torch.tensor([0]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="must ascend"):
        tables(torch.tensor([0]), torch.tensor([0, 1, 0]))
    with pytest.raises(TypeError, match="int32 or int64"):
        tables(torch.tensor([0.5]), torch.tensor([0, 1, 1]))


def flags_at(address: int) -> list[str]:
    """What the system knows of the memory at an address."""
    is_there = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            is_there = begin <= address < end
        elif is_there and first == "VmFlags:":
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    not pathlib.Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_tables_ask_for_huge_pages():
    tables = _C.embedding.QuantisedTables(
        [("t", 200_000, 64, "int8", ["f"])], _C.embedding.PoolingType.SUM, 4
    )
    rows = tables.rows(0)
    assert "hg" in flags_at(rows.data_ptr() + rows.nbytes // 2)
    assert rows.count_nonzero() == 0
