"""Pipelines in Python: the order they promise, what they refuse, and equality with the plain loop."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tessera.comm import NoWait
from tessera.distributed._pipelined_modules import find_args
from tessera.distributed.train_pipeline import (
    ArgInfo,
    EvalPipelineSparseDist,
    PipelinedForward,
    PrefetchTrainPipelineSparseDist,
    Tracer,
    TrainPipelineBase,
    TrainPipelineContext,
    TrainPipelineSparseDist,
)
from tessera.distributed.types import ShardedModule
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


class Tables(ShardedModule):
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

    def compute(self, ctx, dist_input):
        self.events.append("compute")
        ids, begins = dist_input.values().long(), dist_input.offsets()[:-1].long()
        return nn.functional.embedding_bag(ids, self.weight, begins, mode="sum")

    def output_dist(self, ctx, output):
        return output


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
    assert len(train(pipeline, source)) == 2  # not those that were in flight at the end
    assert pipeline.num_in_flight == 0


def test_evaluation_changes_nothing():
    model = Model(Tables())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    pipeline = EvalPipelineSparseDist(model, None, "cpu", modules={"tables": features_of})
    output = pipeline.progress(batches(3))
    assert not output.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_outside_of_progress_modules_are_as_always():
    model = Model(Tables())
    pipeline = TrainPipelineSparseDist(model, None, "cpu", modules={"tables": features_of})
    before = model(Batch(0, 0))[1]
    pipeline.progress(batches(5))
    assert torch.equal(model(Batch(0, 0))[1], before)  # no optimizer: nothing was stepped
    assert "forward" not in model.tables.__dict__
    assert pipeline.num_in_flight == 2
    assert pipeline.detach() is model
    assert pipeline.num_in_flight == 0


def test_training_and_evaluation_take_turns_on_one_model():
    expected_model, model = Model(Tables()), Model(Tables())
    expected = plain(expected_model, torch.optim.SGD(expected_model.parameters(), 0.01), batches(6))
    training = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), 0.01), "cpu")
    evaluation = EvalPipelineSparseDist(model, None, "cpu")
    source = batches(6)
    for output in expected:
        assert torch.equal(training.progress(source), output)
        judged = model(Batch(1, 7))[1]
        assert torch.equal(evaluation.progress(iter([Batch(1, 7)])), judged)
        with pytest.raises(StopIteration):
            evaluation.progress(iter([]))


def test_report_of_a_step():
    model = Model(Tables())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    pipeline = TrainPipelineSparseDist(model, optimizer, "cpu")
    source = batches(4)
    for number in range(4):
        pipeline.progress(source)
        report = pipeline.report
        parts = {
            name: value for name, value in vars(report).items() if name not in ("total", "feature_bytes")
        }
        assert min(report.forward, report.backward, report.step, report.zero_grad) > 0
        assert sum(parts.values()) <= report.total
        assert report.exposed_input_dist == report.wait_ids + report.wait_sizes
        assert report.feature_bytes == Batch(0, number).features.size_in_bytes()
    assert pipeline.losses.shape == (3,)
    assert not pipeline.losses.requires_grad


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
    twice = Model(Tables())
    twice.forward = lambda batch: (twice.tables(batch.features) + twice.tables(batch.features), None)
    pipeline = TrainPipelineSparseDist(twice, None, "cpu", modules={"tables": features_of})
    with pytest.raises(ValueError, match="'tables' was called twice in one forward"):
        pipeline.progress(batches(2))
    assert "forward" not in twice.tables.__dict__
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


def test_after_an_exception_a_pipeline_refuses_to_go_on():
    def failing():
        yield from batches(3)
        raise OSError("the disk is gone")

    model, source = Model(Tables()), failing()
    pipeline = TrainPipelineSparseDist(model, None, "cpu", modules={"tables": features_of})
    pipeline.progress(source)
    with pytest.raises(OSError, match="the disk is gone"):
        pipeline.progress(source)
    with pytest.raises(RuntimeError, match=r"an earlier step raised an exception.*detach\(\)"):
        pipeline.progress(batches(2))
    assert pipeline.detach() is model and pipeline.num_in_flight == 0
    assert len(train(pipeline, batches(2))) == 2


def test_a_step_does_not_change_the_batches_under_itself():
    model = nn.Linear(1, 1)
    pipeline = TrainPipelineBase(model, None, "cpu")
    model.forward = lambda batch: pipeline.reset()
    with pytest.raises(RuntimeError, match="called from within one of its own steps"):
        pipeline.progress(iter([1, 2]))
    pipeline.reset()
    assert pipeline.num_in_flight == 0


def test_a_pipeline_with_batches_in_flight_is_collected():
    pipeline = TrainPipelineSparseDist(Model(Tables()), None, "cpu")
    pipeline.progress(batches(5))
    assert pipeline.num_in_flight == 2
    dropped = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert dropped() is None


def test_what_a_model_may_return():
    losses, output = torch.ones(3, requires_grad=True), torch.zeros(3)
    for result, message in [
        (torch.ones(2, requires_grad=True), r"the model returns Tensor. It has to return \(losses, output\)"),
        (losses.sum(), "the model returns Tensor"),
        ((losses, output, None), "the model returns 3 values"),
        ({"loss": losses, "output": output}, "the model returns dict"),
        (None, "the model returns NoneType"),
        (({"a": losses}, output), "the losses that the model returns are a dict"),
        ((None, output), "the losses that the model returns are a NoneType"),
    ]:
        model = nn.Linear(1, 1)
        model.forward = lambda batch, result=result: result
        with pytest.raises(ValueError, match=message):
            TrainPipelineBase(model, None, "cpu").progress(iter([1, 2]))
    model.forward = lambda batch: [losses, output]
    assert TrainPipelineBase(model, None, "cpu").progress(iter([1, 2])) is output
    model.forward = lambda batch: (None, output)
    assert EvalPipelineSparseDist(model, None, "cpu", modules={}).progress(iter([1, 2])) is output


class Reading(nn.Module):
    """Takes the features in one of the ways a forward may."""

    def __init__(self, how):
        super().__init__()
        self.tables = Tables()
        self.layer = nn.Linear(4, 1)
        self.how = how

    def forward(self, batch):
        rows = self.how(self, batch)
        output = self.layer(rows).squeeze(1)
        return output**2, output


def test_tracing_finds_the_features():
    for how, attrs, is_getitems, name in [
        (lambda self, batch: self.tables(batch.features), ["features"], [False], None),
        (lambda self, batch: self.tables(features=batch["x"].ids), ["x", "ids"], [True, False], "features"),
        (lambda self, batch: self.tables(batch[1]), [1], [True], None),
        (lambda self, batch: self.tables(batch), [], [], None),
    ]:  # fmt: skip
        (info,) = find_args(Reading(how))["tables"]
        assert (info.input_attrs, info.is_getitems, info.name) == (attrs, is_getitems, name)
    model = Model(Tables())
    assert find_args(model)["tables"][0].of(Batch(0, 3)).keys() == ["f", "g"]
    assert find_args(nn.Linear(2, 2)) == {}


def test_modules_that_hold_nothing_sharded_need_not_be_traceable():
    class Branching(nn.Module):
        def forward(self, rows):
            return rows if rows.sum() > 0 else -rows

    def how(self, batch):
        return self.branching(self.tables(batch.features))

    model = Reading(how)
    model.branching = Branching()
    pipeline = TrainPipelineSparseDist(model, None, "cpu")
    assert pipeline.progress(batches(1)).shape == (6,)
    assert model.tables.events == ["start", "compute"]


def test_tracing_refuses():
    for how, message in [
        (
            lambda self, batch: self.tables(batch.features if batch.dense.sum() > 0 else batch.others),
            r"the model's forward cannot be traced \(.*Name its sharded modules, .*modules={'tables': ...}",
        ),
        (
            lambda self, batch: self.tables(batch.features) + self.tables(batch.features),
            "'tables' is called twice in a forward, which cannot be pipelined",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            TrainPipelineSparseDist(Reading(how), None, "cpu")
    replaced = Model(Tables())
    replaced.forward = lambda batch: replaced.tables(batch.others)
    with pytest.raises(ValueError, match=r"cannot be traced \(it is not the forward of its class\)"):
        TrainPipelineSparseDist(replaced, None, "cpu")
    permuted = Reading(lambda self, batch: self.tables(batch.features.permute([1, 0])))
    expected = permuted(Batch(0, 0))[1]
    with pytest.warns(UserWarning, match="the input of 'tables' is computed, .* runs without the pipeline"):
        plain_pipeline = TrainPipelineSparseDist(permuted, None, "cpu")
    assert torch.equal(plain_pipeline.progress(batches(1)), expected)
    pipeline = TrainPipelineSparseDist(
        permuted, None, "cpu", modules={"tables": lambda batch: batch.features.permute([1, 0])}
    )
    assert torch.equal(pipeline.progress(batches(1)), expected)


def test_scripted_layers_give_the_same():
    expected_model, model = Model(Tables()), Model(Tables())
    expected = plain(expected_model, torch.optim.SGD(expected_model.parameters(), 0.01), batches(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    pipeline = TrainPipelineSparseDist(model, optimizer, "cpu", apply_jit=True)
    assert isinstance(model.layer, torch.jit.ScriptModule)
    assert all(torch.equal(a, b) for a, b in zip(train(pipeline, batches(3)), expected, strict=True))


def test_prefetch_sees_every_batch_once_and_before_its_forward():
    class Prefetching(Tables):
        def prefetch(self, dist_input, forward_stream=None, ctx=None):
            self.events.append("prefetch")

    model = Model(Prefetching())
    pipeline = PrefetchTrainPipelineSparseDist(model, None, "cpu")
    assert len(train(pipeline, batches(4))) == 4
    assert " ".join(model.tables.events) == (
        "start start prefetch start compute prefetch start compute prefetch compute prefetch compute"
    )
    assert pipeline.report.prefetch >= 0


def test_the_reference_machinery_has_its_signatures():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model(Tables())

        def forward(self, batch):
            return self.inner(batch)

    nested = Nested()
    assert list(find_args(nested)) == ["inner.tables"]
    whole = Tracer(leaf_modules=["inner"]).trace(nested)
    assert [node.target for node in whole.nodes if node.op == "call_module"] == ["inner"]
    context = TrainPipelineContext()
    tables = Tables()
    forward = PipelinedForward("tables", [ArgInfo(["features"], [False], None)], tables, context, None)
    assert (forward.name, len(forward.args)) == ("tables", 1)
    forward.start(Batch(0, 1), context)
    assert list(context.input_dist_splits_requests) == ["tables"]
    context.wait_ids()
    assert (context.input_dist_splits_requests, list(context.module_contexts)) == ({}, ["tables"])
    assert torch.equal(forward("anything"), tables(Batch(0, 1).features))
    with pytest.raises(ValueError, match="'tables' was called twice in one forward"):
        forward("anything")
