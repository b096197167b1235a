"""The types of sharding put together by hand: input dist, lookup, output dist, against whole tables."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.distributed import embedding, embeddingbag
from tessera.distributed.comm import get_num_groups
from tessera.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from tessera.distributed.embedding_types import BaseQuantEmbeddingSharder
from tessera.distributed.planner.types import SharderData
from tessera.distributed.sharding.sequence_sharding import SequenceShardingContext
from tessera.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tessera.distributed.types import ShardingEnv
from tessera.distributed.utils import PermutePooledEmbeddings
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn

SAMPLES = [3, 0, 5, 2]
RATE = 0.5
BAGS = embeddingbag.EmbeddingBagCollectionSharder({"learning_rate": RATE})
ROWS = embedding.EmbeddingCollectionSharder({"learning_rate": RATE})


def pooled_tables(is_weighted=False):
    torch.manual_seed(7)
    tables = [
        EmbeddingBagConfig(10, 8, "a", feature_names=["f", "g"]),
        EmbeddingBagConfig(7, 4, "b", feature_names=["h"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(3, 4, "c", feature_names=["f"]),
    ]
    return EmbeddingBagCollection(tables, is_weighted=is_weighted)


def row_tables():
    torch.manual_seed(7)
    tables = [
        EmbeddingConfig(10, 4, "a", feature_names=["f", "g"]),
        EmbeddingConfig(3, 4, "c", feature_names=["h"]),
    ]
    return EmbeddingCollection(tables)


def batch(rank, features=("f", "g", "h")):
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 4, (len(features) * SAMPLES[rank],), generator=generator)
    values = torch.randint(0, 3, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(list(features), values, lengths)


def wishes_of(kind, world, names):
    last = world - 1
    wish = {
        "data_parallel": data_parallel,
        "table_wise": lambda: table_wise(last),
        "row_wise": row_wise,
        "column_wise": lambda: column_wise([last, 0]),
        "table_row_wise": lambda: table_row_wise(world // 2 - 1 if world == 4 else 0),
        "table_column_wise": lambda: table_column_wise([last, last]),
    }[kind]
    wishes = {name: wish() for name in names}
    if kind == "table_wise":
        wishes[names[-1]] = table_wise(0)
    if kind == "table_row_wise":
        wishes[names[-1]] = table_row_wise(0)
    return wishes


class Contexts:
    def __init__(self, *contexts):
        self.sharding_contexts = list(contexts)


def ordered(features, names):
    return features.permute([features.keys().index(name) for name in names])


def fill(lookup, sharding, whole, path):
    """Cut this rank's rows out of the whole tables."""
    state = lookup.state_dict()
    weights = dict(whole.named_parameters())
    seen = {}
    for table in sharding.embedding_tables():
        count = seen[table.name] = seen.get(table.name, -1) + 1
        row, column = (0, 0) if table.local_metadata is None else table.local_metadata.shard_offsets
        rows = weights[f"{path}.{table.name}.weight"].detach()[row : row + table.local_rows]
        state[f"{table.name}.weight" + (f"_{count}" if count else "")].copy_(
            rows[:, column : column + table.local_cols]
        )


def expect_rows(lookup, sharding, whole, path, step):
    state = lookup.state_dict()
    weights = dict(whole.named_parameters())
    seen = {}
    for table in sharding.embedding_tables():
        count = seen[table.name] = seen.get(table.name, -1) + 1
        weight = weights[f"{path}.{table.name}.weight"]
        row, column = (0, 0) if table.local_metadata is None else table.local_metadata.shard_offsets
        expected = (weight - step * weight.grad).detach()[row : row + table.local_rows]
        torch.testing.assert_close(
            state[f"{table.name}.weight" + (f"_{count}" if count else "")],
            expected[:, column : column + table.local_cols],
            msg=lambda text, name=table.name: f"{name}: {text}",
        )


def check_pooled(rank, kind):
    world = dist.get_world_size()
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    whole = pooled_tables()
    plan = construct_module_sharding_plan(whole, wishes_of(kind, world, "abc"), BAGS, device_type="cpu")
    infos = embeddingbag.create_sharding_infos_by_sharding(
        whole, plan, "embedding_bags.", {"learning_rate": RATE}
    )
    assert list(infos) == [kind]
    sharding = embeddingbag.create_embedding_bag_sharding(kind, infos[kind], env, permute_embeddings=True)
    lookup = sharding.create_lookup()
    fill(lookup, sharding, whole, "embedding_bags")
    features = ordered(batch(rank), sharding.feature_names())
    context = EmbeddingShardingContext()
    sent = KJTListSplitsAwaitable([sharding.create_input_dist()(features)], Contexts(context))
    arrived = sent.wait().wait()[0]
    rows = sharding.create_output_dist()(lookup(arrived), context).wait()
    factors = sharding.mean_factors(features)
    rows = rows if factors is None else rows * factors
    pooled = embeddingbag.construct_output_kt([rows], sharding.embedding_names(), sharding.embedding_dims())
    expected = whole(batch(rank))
    assert sorted(pooled.keys()) == sorted(expected.keys())
    for name in pooled.keys():  # noqa: SIM118
        torch.testing.assert_close(pooled[name], expected[name], msg=lambda t, name=name: f"{name}: {t}")
    sum((k + 1) * pooled[name].square().sum() for k, name in enumerate(sorted(pooled.keys()))).backward()
    for r in range(world):
        other = whole(batch(r))
        loss = sum((k + 1) * other[name].square().sum() for k, name in enumerate(sorted(other.keys())))
        (loss / world).backward()
    if kind != "data_parallel":  # whole copies leave their gradients
        expect_rows(lookup, sharding, whole, "embedding_bags", RATE)


KINDS = [
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
]


def check_all_pooled(rank):
    if dist.get_world_size() == 4:  # two hosts, as a launcher says
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2",
            GROUP_RANK=str(rank // 2), MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
        )  # fmt: skip
        assert get_num_groups() == 2
    for kind in KINDS:
        check_pooled(rank, kind)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_pooled_types_equal_whole_tables(world):
    run_ranks(world, check_all_pooled)


def check_sequences(rank):
    world = dist.get_world_size()
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    for kind in ("data_parallel", "table_wise", "row_wise", "column_wise"):
        whole = row_tables()
        plan = construct_module_sharding_plan(whole, wishes_of(kind, world, "ac"), ROWS, device_type="cpu")
        infos = embedding.create_sharding_infos_by_sharding(whole, plan, {"learning_rate": RATE})
        sharding = embedding.create_embedding_sharding(kind, infos[kind], env)
        lookup = sharding.create_lookup()
        fill(lookup, sharding, whole, "embeddings")
        features = ordered(batch(rank), sharding.feature_names())
        dist_in = sharding.create_input_dist()
        context = SequenceShardingContext(features_before_input_dist=features)
        arrived = KJTListSplitsAwaitable([dist_in(features)], Contexts(context)).wait().wait()[0]
        context.unbucketize_permute_tensor = getattr(dist_in, "unbucketize_permute_tensor", None)
        context.lengths_after_input_dist = arrived.lengths().view(len(arrived.keys()), arrived.stride())
        rows = sharding.create_output_dist()(lookup(arrived), context).wait()
        expected = whole(batch(rank))
        parts = rows.split(features.length_per_key())
        columns = [shard.shard_offsets[1] if shard else 0 for shard in sharding.embedding_shard_metadata()]
        for name, jagged in expected.items():
            found = sorted((columns[k], k) for k, n in enumerate(sharding.embedding_names()) if n == name)
            own = torch.cat([parts[k] for _, k in found], dim=1)
            torch.testing.assert_close(own, jagged.values(), msg=lambda t, n=name, k=kind: f"{k} {n}: {t}")
        rows.square().sum().backward()
        for r in range(world):
            (sum(j.values().square().sum() for j in whole(batch(r)).values()) / world).backward()
        if kind != "data_parallel":
            expect_rows(lookup, sharding, whole, "embeddings", RATE)


@pytest.mark.parametrize("world", [1, 3])
def test_sequence_types_equal_whole_tables(world):
    run_ranks(world, check_sequences)


def check_variable(rank):
    """Every feature has its own batch; the samples of the full batch share them."""
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    lengths = {"f": [2, 1], "g": [1], "h": [3, 0, 1]}
    inverse = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [2, 1, 0, 0]])
    generator = torch.Generator().manual_seed(rank)
    counts = torch.tensor([n for each in lengths.values() for n in each])
    ids = torch.randint(0, 3, (int(counts.sum()),), generator=generator)
    bags = dict(zip(lengths, ids.split([sum(each) for each in lengths.values()]), strict=True))
    for kind in ("table_wise", "column_wise", "row_wise"):
        whole = pooled_tables()
        plan = construct_module_sharding_plan(whole, wishes_of(kind, 2, "abc"), device_type="cpu")
        infos = embeddingbag.create_sharding_infos_by_sharding(whole, plan, "embedding_bags.", None)
        sharding = embeddingbag.create_embedding_bag_sharding(kind, infos[kind], env, permute_embeddings=True)
        lookup = sharding.create_lookup()
        fill(lookup, sharding, whole, "embedding_bags")
        names = sharding.feature_names()
        features = KeyedJaggedTensor(
            keys=names,
            values=torch.cat([bags[name] for name in names]),
            lengths=torch.tensor([n for name in names for n in lengths[name]]),
            stride_per_key_per_rank=[[len(lengths[name])] for name in names],
            inverse_indices=(list(lengths), inverse),
        )
        context = EmbeddingShardingContext(
            batch_size_per_feature_pre_a2a=features.stride_per_key(), variable_batch_per_feature=True
        )
        sent = KJTListSplitsAwaitable([sharding.create_input_dist()(features)], Contexts(context))
        arrived = sent.wait().wait()[0]
        rows = sharding.create_output_dist()(lookup(arrived), context)
        factors = sharding.mean_factors(features)
        assert (factors is not None) == (kind == "row_wise")
        if factors is not None:
            rows.callbacks.append(factors.mul)
        dims = sharding.uncombined_embedding_dims()
        permute = sharding.embedding_permute() if kind == "column_wise" else list(range(len(dims)))
        pooled = embeddingbag.VariableBatchEmbeddingBagCollectionAwaitable(
            [rows],
            (list(lengths), inverse),
            features.stride_per_key(),
            sharding.uncombined_embedding_names(),
            dims,
            sharding.embedding_names(),
            sharding.embedding_dims(),
            PermutePooledEmbeddings(dims, permute),
        ).wait()
        weights = {name: table.weight.detach() for name, table in whole.embedding_bags.items()}
        for feature, output, table in (
            ("f", "f@a", "a"),
            ("g", "g", "a"),
            ("h", "h", "b"),
            ("f", "f@c", "c"),
        ):
            own = torch.stack([weights[table][b].sum(0) for b in bags[feature].split(lengths[feature])])
            if table == "b":
                own /= torch.tensor(lengths[feature]).clamp(min=1).unsqueeze(1)
            row = inverse[list(lengths).index(feature)]
            torch.testing.assert_close(pooled[output].detach(), own[row], msg=lambda t, k=kind: f"{k}: {t}")


def check_errors(rank):
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with pytest.raises(ValueError, match="'grid_shard' is not one of data_parallel, table_wise"):
        embeddingbag.create_embedding_bag_sharding("grid_shard", [], env)
    with pytest.raises(ValueError, match="'table_row_wise' is not one of data_parallel, table_wise"):
        embedding.create_embedding_sharding("table_row_wise", [], env)
    whole = pooled_tables()
    plan = construct_module_sharding_plan(whole, wishes_of("table_wise", 2, "abc"), device_type="cpu")
    infos = embeddingbag.create_sharding_infos_by_sharding(whole, plan, "embedding_bags.", None)["table_wise"]
    embeddingbag.create_embedding_bag_sharding("table_wise", infos, env, torch.device("meta"))
    assert str(infos[0].param_sharding.sharding_spec.shards[0].placement) == "rank:1/meta"
    infos[0].param_sharding.sharding_spec = None
    with pytest.raises(ValueError, match="table 'a' has no list of shards"):
        embeddingbag.create_embedding_bag_sharding("table_wise", infos, env)
    mixed = EmbeddingCollection([EmbeddingConfig(4, 4, "a"), EmbeddingConfig(4, 2, "b")])
    plan = construct_module_sharding_plan(mixed, {"a": row_wise(), "b": row_wise()}, device_type="cpu")
    infos = embedding.create_sharding_infos_by_sharding(mixed, plan, None)["row_wise"]
    sharding = embedding.create_embedding_sharding("row_wise", infos, env)
    with pytest.raises(ValueError, match=r"the parts have \[2, 4\] columns; they must have the same"):
        sharding.create_output_dist()
    plan = construct_module_sharding_plan(whole, wishes_of("table_row_wise", 2, "abc"), device_type="cpu")
    by_host = embeddingbag.create_sharding_infos_by_sharding(whole, plan, "embedding_bags.", None)
    hosted = embeddingbag.create_embedding_bag_sharding("table_row_wise", by_host["table_row_wise"], env)
    with pytest.raises(ValueError, match="table_row_wise: batches vary per feature"):
        hosted.create_output_dist()(torch.zeros(0), EmbeddingShardingContext(variable_batch_per_feature=True))
    dist_out = embedding.create_embedding_sharding("row_wise", infos[:1], env).create_output_dist()
    with pytest.raises(ValueError, match="the context does not say which ids have arrived"):
        dist_out(torch.zeros(0, 4))


@pytest.mark.parametrize("body", [check_variable, check_errors])
def test_two_ranks(body):
    run_ranks(2, body)


class QuantSharder(BaseQuantEmbeddingSharder[nn.Module]):
    def shard(self, module, params, env, device=None, module_fqn=None):
        raise NotImplementedError

    @property
    def module_type(self):
        return nn.Module


def test_sharders_of_quantised_tables():
    module = pooled_tables()
    sharder = QuantSharder({"output_dtype": "fp16"})
    assert sharder.fused_params == {"output_dtype": "fp16"}
    assert sharder.sharding_types("cpu") == ["table_wise", "row_wise", "column_wise"]
    assert sharder.compute_kernels("table_wise", "cpu") == ["quant"]
    assert sharder.compute_kernels("row_wise", "cuda") == ["quant", "quant_uvm", "quant_uvm_caching"]
    assert sorted(sharder.shardable_parameters(module)) == ["a", "b", "c"]
    assert sorted(QuantSharder(shardable_params=["c", "a", "b"]).shardable_parameters(module)) == list("abc")
    assert QuantSharder(shardable_params=["other"]).shardable_parameters(module) == {}
    with pytest.raises(ValueError, match=r"tables \['b', 'c'\] of the module are not named"):
        QuantSharder(shardable_params=["a"]).shardable_parameters(module)
    table = torch.zeros(10, 8, dtype=torch.uint8)
    assert sharder.storage_usage(table, "cpu", "quant") == {"ddr": 10 * 8}
    assert sharder.storage_usage(table, "cuda", "quant") == {"hbm": 80}
    assert sharder.storage_usage(table, "cuda", "quant_uvm") == {"ddr": 80}
    # As one that is known by its type alone.
    data = SharderData({}, {}, "BaseQuantEmbeddingSharder")
    assert data.usage(table, "cpu", "quant") == {"ddr": 80}
    assert data.usage(table[:, 4:], "cuda", "quant") == {"hbm": 80}
    assert SharderData({}, {}).usage(table[:, 4:], "cpu", "fused") == {"ddr": 40}


def test_no_group_yet():
    with pytest.raises(ValueError, match="there is no group yet"):
        ShardingEnv.from_process_group(None)
