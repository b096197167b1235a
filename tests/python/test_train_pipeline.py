"""Pipelines in Python: the order they promise, what they refuse, and equality with the plain loop."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.comm import NoWait
from tessera.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn

TRAINING = [TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist]


class Batch:
    def __init__(self, rank, number):
        generator = torch.Generator().manual_seed(100 * number + rank)
        lengths = torch.randint(0, 4, (6,), generator=generator)
        values = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
        self.number = number
        self.dense = torch.randn(3, 2, generator=generator)
        self.features = KeyedJaggedTensor.from_lengths_sync(["f", "g"], values, lengths)

    def to(self, device, non_blocking=False):
        return self


def batches(count, rank=0):
    return (Batch(rank, i) for i in range(count))


class Tables(nn.Module):
    """A sharded module of one rank, which writes down what is done with it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.events = []

    def create_context(self):
        return {}

    def input_dist(self, ctx, features):
        self.events.append("start")
        return NoWait(NoWait(features))

    def compute_and_output_dist(self, ctx, features):
        self.events.append("compute")
        bags = features.values().long(), features.offsets()[:-1].long()
        return nn.functional.embedding_bag(*bags[:1], self.weight, bags[1], mode="sum")

    def forward(self, features):
        return self.compute_and_output_dist({}, features)


class Model(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        torch.manual_seed(2)
        self.layer = nn.Linear(10, 1)

    def forward(self, batch):
        rows = self.tables(batch.features).view(2, 3, 4).transpose(0, 1).reshape(3, 8)
        output = self.layer(torch.cat([batch.dense, rows], 1)).squeeze(1)
        return (output - 1) ** 2, output


def features_of(batch):
    return batch.features


def train(pipeline, source):
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(source).detach())
        except StopIteration:
            return outputs


def plain(model, optimizer, source):
    outputs = []
    for batch in source:
        optimizer.zero_grad()
        losses, output = model(batch)
        losses.sum().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs


@pytest.mark.parametrize("kind", TRAINING)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_equal_to_the_plain_loop(kind, count):
    expected_model = Model(Tables())
    expected = plain(expected_model, torch.optim.SGD(expected_model.parameters(), 0.01), batches(count))
    model = Model(Tables())
    pipeline = kind(model, torch.optim.SGD(model.parameters(), 0.01), "cpu", modules={"tables": features_of})
    outputs = train(pipeline, batches(count))
    assert len(outputs) == count
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    for a, b in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_order():
    for kind, expected in [
        (TrainPipelineBase, "start compute start compute start compute"),
        (TrainPipelineSparseDist, "start start compute start compute compute"),
        (PrefetchTrainPipelineSparseDist, "start start start compute compute compute"),
    ]:
        model = Model(Tables())
        train(kind(model, None, "cpu", modules={"tables": features_of}), batches(3))
        assert " ".join(model.tables.events) == expected


def test_batches_in_flight_and_leaving_them():
    model = Model(Tables())
    pipeline = TrainPipelineSparseDist(model, None, "cpu", False, modules={"tables": features_of})
    source = batches(5)
    pipeline.progress(source)
    assert pipeline.num_in_flight == 2
    assert len(train(pipeline, source)) == 3
    assert pipeline.num_in_flight == 0


def test_evaluation_changes_nothing():
    model = Model(Tables())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    pipeline = EvalPipelineSparseDist(model, None, "cpu", modules={"tables": features_of})
    output = pipeline.progress(batches(3))
    assert not output.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_detach_gives_the_forward_back():
    model = Model(Tables())
    pipeline = TrainPipelineSparseDist(model, None, "cpu", modules={"tables": features_of})
    with pytest.raises(ValueError, match="'tables' was called twice in one forward, or outside"):
        model(Batch(0, 0))
    assert pipeline.detach() is model
    assert model(Batch(0, 0))[1].shape == (3,)


def test_refusals():
    model = Model(Tables())
    model.again = model.tables
    for modules, message in [
        ({"nothing": features_of}, "the model has no module 'nothing'"),
        ({"layer": features_of}, "'layer' is no sharded module"),
        ({"tables": None}, "'tables' has no extractor"),
        ({"tables": features_of, "again": features_of}, "'again' is registered under another name"),
    ]:
        with pytest.raises(ValueError, match=message):
            TrainPipelineSparseDist(model, None, "cpu", modules=modules)
    assert "forward" not in model.tables.__dict__
    skipping = Model(Tables())
    skipping.forward = lambda batch: (skipping.layer(torch.zeros(1, 10)), None)
    pipeline = TrainPipelineSparseDist(skipping, None, "cpu", modules={"tables": features_of})
    with pytest.raises(ValueError, match="forward did not call 'tables'"):
        pipeline.progress(batches(2))
    trained = TrainPipelineSparseDist(
        Model(Tables()),
        None,
        "cpu",
        modules={
            "tables": lambda batch: KeyedJaggedTensor(
                batch.features.keys(),
                batch.features.values(),
                weights=torch.ones(len(batch.features.values()), requires_grad=True),
                lengths=batch.features.lengths(),
            )
        },
    )
    with pytest.raises(ValueError, match="the weights of 'tables' need a gradient"):
        trained.progress(batches(2))


def sharded_model():
    from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from tessera.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from tessera.distributed.types import ShardingEnv
    from tessera.modules.embedding_configs import EmbeddingBagConfig
    from tessera.modules.embedding_modules import EmbeddingBagCollection

    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(5, 4, "a", feature_names=["f"]),
        EmbeddingBagConfig(5, 4, "b", feature_names=["g"]),
    ]
    ebc = EmbeddingBagCollection(tables, device=torch.device("cpu"))
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.05})
    wishes = {"a": row_wise(), "b": table_wise(1)}
    plan = construct_module_sharding_plan(ebc, wishes, sharder, device_type="cpu")

    class Sharded(nn.Module):
        def __init__(self):
            super().__init__()
            self.ebc = sharder.shard(ebc, plan, ShardingEnv.from_process_group(dist.group.WORLD))
            torch.manual_seed(4)
            self.layer = nn.Linear(10, 1)

        def forward(self, batch):
            rows = self.ebc(batch.features)
            parts = [batch.dense, rows["f"], rows["g"]]
            output = self.layer(torch.cat(parts, 1)).squeeze(1)
            return (output - 1) ** 2, output

    return Sharded()


def check_sharded(rank):
    expected_model = sharded_model()
    optimizer = torch.optim.SGD(expected_model.layer.parameters(), 0.01)
    expected = plain(expected_model, optimizer, batches(5, rank))
    for kind in TRAINING:
        model = sharded_model()
        optimizer = torch.optim.SGD(model.layer.parameters(), 0.01)
        pipeline = kind(model, optimizer, "cpu", modules={"ebc": features_of})
        outputs = train(pipeline, batches(5, rank))
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)), kind
        pipeline.detach()
        rows = expected_model.ebc.gather_tables()
        for name, weight in model.ebc.gather_tables().items():
            assert torch.equal(weight, rows[name]), name


def test_sharded_tables_in_processes():
    pytest.importorskip("tessera.distributed.embeddingbag")
    run_ranks(2, check_sharded)
