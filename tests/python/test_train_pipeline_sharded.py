"""Pipelines over tables on several ranks: the bits of the plain loop, one message of sizes, errors alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera import _C
from tessera.distributed.embedding import EmbeddingCollectionSharder
from tessera.distributed.embedding_types import KJTList
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.model_parallel import DistributedModelParallel, dense_parameters
from tessera.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tessera.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    FusedKJTListSplitsAwaitable,
    KJTAllToAllForward,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from tessera.distributed.types import ShardingEnv, ShardingPlan
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn

PIPELINES = [TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist]


class Batch:
    """Of another size on every rank and step, sometimes empty."""

    def __init__(self, rank, number):
        generator = torch.Generator().manual_seed(100 * number + rank)
        self.size = (number + 2 * rank) % 4
        self.dense = torch.randn(self.size, 2, generator=generator)
        self.bags = self._features(["f", "g"], generator)
        self.words = self._features(["w"], generator)

    def _features(self, keys, generator):
        lengths = torch.randint(0, 4, (len(keys) * self.size,), generator=generator)
        values = torch.randint(0, 6, (int(lengths.sum()),), generator=generator)
        return KeyedJaggedTensor(keys, values, lengths=lengths, stride=self.size)


class Model(nn.Module):
    """Two pooled collections and one of single rows."""

    def __init__(self):
        super().__init__()
        self.first = EmbeddingBagCollection(tables=[EmbeddingBagConfig(6, 4, "a", feature_names=["f"])])
        self.inner = nn.Module()
        self.inner.second = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(6, 4, "items", feature_names=["g"]),
                EmbeddingBagConfig(6, 2, "c", feature_names=["f"]),
            ]
        )
        self.words = EmbeddingCollection(tables=[EmbeddingConfig(6, 3, "d", feature_names=["w"])])
        self.layer = nn.Linear(12, 1)

    def forward(self, batch):
        first = self.first(batch.bags)
        second = self.inner.second(batch.bags)
        words = self.words(batch.words)
        rows = torch.cat([batch.dense, first["f"], second["g"], second["f"]], 1)
        output = self.layer(rows).squeeze(1)
        return (output - 1) ** 2 + words["w"].values().sum(), output


SHARDERS = [
    EmbeddingBagCollectionSharder({"learning_rate": 0.05, "optimizer": "exact_adagrad"}),
    EmbeddingCollectionSharder({"learning_rate": 0.05}),
]


def sharded_model():
    torch.manual_seed(3)
    model = Model()
    world = dist.get_world_size()
    bags, rows = SHARDERS
    place = {
        "first": (model.first, {"a": row_wise()}, bags),
        "inner.second": (model.inner.second, {"items": table_wise(world - 1), "c": row_wise()}, bags),
        "words": (model.words, {"d": row_wise()}, rows),
    }
    plan = {
        path: construct_module_sharding_plan(module, wishes, sharder, world, device_type="cpu")
        for path, (module, wishes, sharder) in place.items()
    }
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env, plan=ShardingPlan(plan), sharders=SHARDERS)


def tables_of(model):
    inner = model.module
    return {
        name: rows
        for module in (inner.first, inner.inner.second, inner.words)
        for name, rows in module.gather_tables().items()
    }


def source(rank, count):
    return (Batch(rank, number) for number in range(count))


def train_plainly(rank, count):
    model = sharded_model()
    optimizer = torch.optim.SGD(dense_parameters(model), 0.01)
    outputs = []
    for batch in source(rank, count):
        optimizer.zero_grad()
        losses, output = model(batch)
        losses.sum().backward()
        optimizer.step()
        outputs.append(output.detach())
    return model, outputs


def drain(pipeline, batches):
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(batches).detach())
        except StopIteration:
            return outputs


def check_same_bits(rank):
    for count in (1, 2, 6):
        expected_model, expected = train_plainly(rank, count)
        rows = tables_of(expected_model)
        for kind in PIPELINES:
            model = sharded_model()
            pipeline = kind(model, torch.optim.SGD(dense_parameters(model), 0.01), torch.device("cpu"))
            outputs = drain(pipeline, source(rank, count))
            assert len(outputs) == count
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)), (kind, count)
            for name, weight in tables_of(model).items():
                assert torch.equal(weight, rows[name]), (kind, count, name)
            for a, b in zip(dense_parameters(model), dense_parameters(expected_model), strict=True):
                assert torch.equal(a, b), (kind, count)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_bits_of_the_plain_loop(world):
    run_ranks(world, check_same_bits)


def check_messages(rank):
    calls = []
    original = _C.sharding.fused_input_dist

    def counted(inputs):
        calls.append(len(inputs))
        return original(inputs)

    _C.sharding.fused_input_dist = counted
    model = sharded_model()
    for module in (model.module.first, model.module.inner.second, model.module.words):
        assert len(module._engines) == 1
    pipeline = TrainPipelineSparseDist(model, None, torch.device("cpu"))
    drain(pipeline, source(rank, 4))
    assert calls == [3, 3, 3, 3]  # one message of a batch, for all three modules
    calls.clear()
    model(Batch(rank, 0))
    assert calls == [1, 1, 1]


def test_the_sizes_of_all_modules_travel_in_one_message():
    run_ranks(2, check_messages)


def check_groups(rank):
    """Modules of different groups do not share a message, whatever the order they are named in."""
    other = dist.new_group([0, 1], backend="shm")
    torch.manual_seed(5)
    model = nn.Module()
    for name, group in [("a", dist.group.WORLD), ("b", other), ("c", dist.group.WORLD)]:
        bags = EmbeddingBagCollection(tables=[EmbeddingBagConfig(6, 4, name, feature_names=["f"])])
        plan = construct_module_sharding_plan(bags, {name: row_wise()}, SHARDERS[0], 2, device_type="cpu")
        setattr(model, name, SHARDERS[0].shard(bags, plan, ShardingEnv.from_process_group(group)))

    def forward(batch):
        rows = [getattr(model, name)(batch.bags)["f"] for name in "abc"]
        output = torch.cat(rows, 1)
        return output, output

    model.forward = forward
    expected = [forward(batch)[1].detach() for batch in source(rank, 3)]
    pipeline = EvalPipelineSparseDist(
        model, None, torch.device("cpu"), modules={name: lambda batch: batch.bags for name in "abc"}
    )
    outputs = drain(pipeline, source(rank, 3))
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_modules_of_different_groups():
    run_ranks(2, check_groups)


def check_evaluation(rank):
    model = sharded_model()
    before = tables_of(model)
    with torch.no_grad():
        expected = [model(batch)[1] for batch in source(rank, 5)]
    pipeline = EvalPipelineSparseDist(model, None, torch.device("cpu"))
    outputs = drain(pipeline, source(rank, 5))
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    for name, rows in tables_of(model).items():
        assert torch.equal(rows, before[name])


def test_evaluation():
    run_ranks(3, check_evaluation)


def check_report(rank):
    model = sharded_model()
    pipeline = TrainPipelineSparseDist(model, None, torch.device("cpu"))
    batches = source(rank, 3)
    for number in range(3):
        pipeline.progress(batches)
        batch = Batch(rank, number)
        assert pipeline.report.feature_bytes == 2 * batch.bags.size_in_bytes() + batch.words.size_in_bytes()
        assert pipeline.report.forward > 0
        assert pipeline.report.total >= pipeline.report.forward + pipeline.report.exposed_input_dist


def test_report():
    run_ranks(2, check_report)


def train_on_a_bad_id(rank):
    def words_of(batch):
        if rank == 1 and batch.size == 3:
            return KeyedJaggedTensor(["w"], torch.tensor([0, 99]), lengths=torch.tensor([1, 1, 0]), stride=3)
        return batch.words

    def bags_of(batch):
        return batch.bags

    modules = {"first": bags_of, "inner.second": bags_of, "words": words_of}
    pipeline = TrainPipelineSparseDist(sharded_model(), None, torch.device("cpu"), modules=modules)
    drain(pipeline, source(rank, 6))


def test_a_bad_id_is_the_same_error_on_all_ranks():
    outcomes = run_ranks_collecting(2, train_on_a_bad_id)
    assert "99" in outcomes[0].error
    assert "'w'" in outcomes[0].error
    assert outcomes[0].error == outcomes[1].error


class _Context:
    sharding_contexts: list = []  # noqa: RUF012


class _Requests:
    def __init__(self, metas):
        self.awaitables = metas


def check_forward_of_an_exchange(rank):
    group = dist.group.WORLD
    features = Batch(rank, 3).bags
    forward = KJTAllToAllForward(group, [1, 1])
    metas = [forward(features), forward(features)]
    assert metas[0].keys == ["f" if rank == 0 else "g"]
    lists = FusedKJTListSplitsAwaitable(
        [_Requests(metas[:1]), _Requests(metas[1:])], [_Context(), _Context()], group
    ).wait()
    received = [each.wait() for each in lists]
    assert all(isinstance(each, KJTList) for each in received)
    place = rank
    expected = torch.cat([Batch(r, 3).bags.split([1, 1])[place].values() for r in range(2)])
    assert [each[0].values().tolist() for each in received] == [expected.tolist()] * 2


def test_the_forward_of_an_exchange():
    run_ranks(2, check_forward_of_an_exchange)
