"""Jagged batches and collections inside torch.compile, torch.export, torch.fx and torch.jit.trace."""

from __future__ import annotations

import copy
import io
import shutil

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera import _C
from tessera.distributed.embedding import EmbeddingCollectionSharder
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.model_parallel import DistributedModelParallel
from tessera.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tessera.distributed.types import ShardingEnv, ShardingPlan
from tessera.fx import symbolic_trace
from tessera.modules import _traced_rows
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tessera.sparse.jagged_tensor import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    kjt_is_equal,
    regroup_kts,
)
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

KEYS = ["a", "b", "c"]
BATCHES = (3, 5, 4, 7)


def batch(samples, seed=0, is_weighted=False):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS) * samples,), generator=generator)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if is_weighted else None
    return KeyedJaggedTensor(KEYS, ids, weights, lengths)


def bags(**options):
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(9, 4, "t", feature_names=["a", "c"]),
            EmbeddingBagConfig(9, 8, "u", feature_names=["b", "a"], pooling=PoolingType.MEAN),
        ],
        **options,
    )


def rows(**options):
    return EmbeddingCollection(
        [
            EmbeddingConfig(9, 4, "t", feature_names=["a", "c"]),
            EmbeddingConfig(9, 8, "u", feature_names=["b", "a"]),
        ],
        **options,
    )


class Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(1)
        self.tables = bags(**options)
        self.over = nn.Linear(24, 2)

    def forward(self, features):
        found = self.tables(features)
        return self.over(torch.cat([found["c"], found["a@t"], found["b"], found["a@u"]], 1)).tanh()


class Rows(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(1)
        self.tables = rows(**options)
        self.over = nn.Linear(4, 2)

    def forward(self, features):
        found = self.tables(features)
        return self.over(found["c"].to_padded_dense(3).sum(1)).tanh() + found["b"].values().sum().tanh()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def train(model, called, is_weighted=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed, samples in enumerate(BATCHES):
        loss = called(batch(samples, seed, is_weighted)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def fused():
    options = _C.embedding.OptimizerOptions()
    options.learning_rate = 0.1
    return options


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(("model", "is_weighted"), [(Bags, False), (Bags, True), (Rows, False)])
def test_a_compiled_model_trains_as_it_does_eagerly(model, is_weighted, is_fused):
    options = {"is_weighted": True} if is_weighted else {}
    if is_fused:
        options["optimizer"] = fused()
    plain, compiled = model(**options), model(**options)
    losses, parameters = train(plain, plain, is_weighted)
    called = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    found, their_parameters = train(compiled, called, is_weighted)
    assert found == pytest.approx(losses, rel=1e-6)
    for ours, theirs in zip(parameters, their_parameters, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-7)
    assert not _traced_rows._tickets  # graphs go with their tensors
    torch._dynamo.utils.counters.clear()


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.timeout(300)  # compiles C++ against torch's headers, twice
def test_a_model_of_machine_code_trains_as_it_does_eagerly():
    found = []
    for model in (Bags(), Bags()):
        called = torch.compile(model, fullgraph=True, backend="inductor") if found else model
        loss = called(batch(4)).square().sum()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert len(found[0]) > 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


def test_batches_of_other_sizes_are_one_more_graph():
    model = Bags()
    torch._dynamo.utils.counters.clear()
    called = torch.compile(model, fullgraph=True, backend="eager")
    for seed, samples in enumerate(BATCHES):
        features = batch(samples, seed)
        assert torch.equal(called(features), model(features))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_gradients_of_the_weights_of_ids():
    model = Bags(is_weighted=True)
    found = []
    for called in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        features = batch(4, is_weighted=True)
        weights = features.weights().requires_grad_(True)
        called(features.with_weights(weights)).sum().backward()
        found.append(weights.grad)
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(found[1], found[0])


def test_a_forward_without_gradients_keeps_nothing():
    called = torch.compile(Bags(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        result = called(batch(3))
    assert not result.requires_grad
    assert not _traced_rows._tickets


def test_a_forward_that_is_never_stepped_is_forgotten():
    called = torch.compile(Bags(), fullgraph=True, backend="aot_eager")
    result = called(batch(3))
    assert len(_traced_rows._tickets) == 1
    del result
    assert not _traced_rows._tickets


def test_an_id_outside_its_table_is_named_from_a_compiled_model_too():
    called = torch.compile(Bags(), fullgraph=True, backend="aot_eager")
    features = KeyedJaggedTensor(KEYS, torch.tensor([1, 99]), lengths=torch.tensor([1, 0, 1]))
    with pytest.raises(IndexError, match=r"'c'.*99"):
        called(features)


def parts(features):
    by_key = features.to_dict()
    first, second = features.split([1, 2])
    swapped = features.permute([2, 0])
    together = KeyedJaggedTensor.concat([first, swapped])
    return [
        features["b"].values(),
        features.offsets(),
        by_key["a"].lengths(),
        by_key["c"].offsets(),
        by_key["c"].to_padded_dense(2, 7.0),
        second.values(),
        second.lengths(),
        swapped.values(),
        swapped.weights(),
        together.values(),
        together.lengths(),
        KeyedJaggedTensor.from_jt_dict({"b": by_key["b"], "a": by_key["a"]}).values(),
        features.with_weights(None).values() * features.stride(),
    ]


def test_the_methods_of_a_batch_inside_a_graph():
    def from_tensors(values, weights, lengths):
        return parts(KeyedJaggedTensor.from_lengths_sync(KEYS, values, lengths, weights))

    for samples in (3, 1):
        features = batch(samples, 3, is_weighted=True)
        given = (features.values(), features.weights(), features.lengths())
        expected = parts(features)
        for function, arguments in ((parts, (features,)), (from_tensors, given)):
            torch._dynamo.reset()
            found = torch.compile(function, fullgraph=True, backend="eager")(*arguments)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs)


def test_batches_come_out_of_a_graph_whole():
    def swap(features):
        return features.permute([1, 0, 2]), KeyedTensor(["x", "y"], [1, 1], features.values().view(-1, 2))

    lengths = torch.tensor([2, 0, 1, 1, 0, 2])
    features = KeyedJaggedTensor(KEYS, torch.arange(6), lengths=lengths)
    swapped, columns = torch.compile(swap, fullgraph=True, backend="eager")(features)
    assert kjt_is_equal(swapped, features.permute([1, 0, 2]))
    assert swapped.length_per_key() == [2, 2, 2]
    assert str(swapped) == str(features.permute([1, 0, 2]))
    assert columns["y"].tolist() == [[1], [3], [5]]


def test_regroup_inside_a_graph():
    def both(first, second):
        return regroup_kts([first, second], [["b", "z"], ["a"], []])

    first = KeyedTensor(["a", "b"], [1, 2], torch.randn(2, 3))
    second = KeyedTensor(["z"], [2], torch.randn(2, 2))
    found = torch.compile(both, fullgraph=True, backend="eager")(first, second)
    for ours, theirs in zip(found, both(first, second), strict=True):
        assert torch.equal(ours, theirs)


def test_variable_batches_are_compiled():
    features = KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.tensor([1, 2, 3, 4, 5, 6]),
        lengths=torch.tensor([2, 1, 1, 0, 2]),
        stride_per_key_per_rank=[[2], [1], [2]],
        inverse_indices=(["a", "b", "c"], torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 1]])),
    )
    for model in (bags(), rows()):
        torch._dynamo.reset()
        found = torch.compile(model, fullgraph=True, backend="eager")(features)
        expected = model(features)
        if isinstance(expected, KeyedTensor):
            assert torch.equal(found.values(), expected.values())
            continue
        for name, each in expected.items():
            assert torch.equal(found[name].values(), each.values())
            assert found[name].lengths().tolist() == each.lengths().tolist()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("model", [Bags, Rows])
def test_export(model, strict):
    module = model().eval()
    features = batch(4)
    program = torch.export.export(module, (features,), strict=strict)
    assert torch.equal(program.module()(features), module(features))
    assert any("tessera.rows" in str(node.target) for node in program.graph.nodes)
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    assert torch.equal(torch.export.load(saved).module()(features), module(features))


def test_export_of_batches_of_any_size():
    module = Bags().eval()
    features = batch(4, 1)
    auto = torch.export.Dim.AUTO
    shapes = ([{0: auto}, None, {0: auto}, None, None],)
    program = torch.export.export(module, (features,), dynamic_shapes=shapes, strict=False)
    for samples in (2, 9):
        other = batch(samples, samples)
        assert torch.equal(program.module()(other), module(other))


class FromTensors(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, values, lengths):
        return self.model(KeyedJaggedTensor(keys=KEYS, values=values, lengths=lengths))


@pytest.mark.parametrize("model", [Bags, Rows])
@pytest.mark.parametrize("trace", [symbolic_trace, torch.fx.symbolic_trace])
def test_fx(model, trace):
    module = model()
    features = batch(4)
    traced = trace(module)
    assert torch.equal(traced(features), module(features))
    assert next(node.target for node in traced.graph.nodes if node.op == "call_module") == "tables"
    whole = FromTensors(module)
    traced = trace(whole)
    assert any(node.target is KeyedJaggedTensor for node in traced.graph.nodes)
    given = (features.values(), features.lengths())
    assert torch.equal(traced(*given), whole(*given))
    compiled = torch.compile(traced, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*given), whole(*given))


def test_fx_of_a_collection_by_itself_looks_inside():
    module = bags()
    features = batch(3)
    traced = torch.fx.symbolic_trace(module)
    assert any(node.op == "get_attr" for node in traced.graph.nodes)
    torch.testing.assert_close(traced(features).values(), module(features).values())
    again = torch.fx.symbolic_trace(traced)
    torch.testing.assert_close(again(features).values(), module(features).values())


def test_fx_of_batches():
    def function(values, lengths, first, second):
        features = KeyedJaggedTensor.from_lengths_sync(KEYS, values, lengths)
        together = KeyedJaggedTensor.concat([features, features])
        columns = KeyedTensor.from_tensor_list(["x", "y"], [first, second])
        return together["b"].values(), regroup_kts([columns], [["y", "x"]])[0]

    features = batch(2)
    given = (features.values(), features.lengths(), torch.randn(2, 1), torch.randn(2, 2))
    for found, expected in zip(torch.fx.symbolic_trace(function)(*given), function(*given), strict=True):
        assert torch.equal(found, expected)


def test_jit_trace_follows_the_batch():
    module = FromTensors(Bags())
    first, second = batch(4, 1), batch(7, 2)
    traced = torch.jit.trace(module, (first.values(), first.lengths()))
    given = (second.values(), second.lengths())
    assert torch.equal(traced(*given), module(*given))


def test_jit_trace_refuses_what_it_would_freeze():
    features = batch(4)
    with pytest.raises(TypeError, match=r"Use torch\.export"):
        torch.jit.trace(FromTensors(Rows()), (features.values(), features.lengths()))


def test_trees():
    features = batch(3, is_weighted=True)
    leaves, spec = tree_flatten(features)
    assert kjt_is_equal(tree_unflatten(leaves, spec), features)
    assert (
        tree_map(lambda leaf: None if leaf is None else leaf.shape, features)._values
        == features.values().shape
    )
    jagged = JaggedTensor(torch.arange(3), lengths=torch.tensor([2, 1]))
    assert tree_map(lambda leaf: None if leaf is None else leaf * 2, jagged).values().tolist() == [0, 2, 4]
    assert copy.deepcopy(features).weights().tolist() == features.weights().tolist()


# ---- over ranks ----

PLANS = {
    "t": {"table": table_wise(rank=1), "rows": row_wise(), "columns": column_wise(ranks=[0, 1])},
    "u": {"table": table_wise(rank=0), "rows": row_wise(), "columns": data_parallel()},
}


def sharded(model, plan, in_backward):
    model = model()
    if in_backward:
        apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.1})
    sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    sharder = next(each for each in sharders if each.module_type is type(model.tables))
    of_tables = construct_module_sharding_plan(
        model.tables,
        {name: plans[plan] for name, plans in PLANS.items()},
        sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        ShardingEnv.from_process_group(dist.group.WORLD),
        plan=ShardingPlan({"tables": of_tables}),
        sharders=sharders,
        device=torch.device("cpu"),
    )


def sharded_rank(rank, kind, plan, in_backward):
    torch._dynamo.reset()
    found = []
    for is_compiled in (False, True):
        model = sharded(kind, plan, in_backward)
        if is_compiled:  # inside of the wrapper that averages the gradients of the rest
            model.module.compile(fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for seed, samples in enumerate(BATCHES):
            loss = model(batch(samples + rank, 10 * rank + seed)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append((losses, model.module.tables.gather_tables()))
    (losses, tables), (their_losses, their_tables) = found
    assert their_losses == pytest.approx(losses, rel=1e-6)
    for name, table in tables.items():
        torch.testing.assert_close(their_tables[name], table, rtol=1e-6, atol=1e-7)
    features = batch(4, 50 + rank)
    expected = model(features)
    inner = model.module
    inner._compiled_call_impl = None
    program = torch.export.export(inner, (features,), strict=False)
    torch.testing.assert_close(program.module()(features), expected)
    traced = symbolic_trace(inner)
    torch.testing.assert_close(traced(features), expected)


@pytest.mark.parametrize(
    ("kind", "plan", "in_backward"),
    [(Bags, "table", True), (Bags, "columns", False), (Rows, "rows", True), (Rows, "columns", False)],
)
def test_a_sharded_model_is_compiled_exported_and_traced(kind, plan, in_backward):
    run_ranks(2, sharded_rank, kind, plan, in_backward, limit=240)


def test_a_sharded_program_names_the_model_it_misses():
    with pytest.raises(RuntimeError, match="runs where its model lives"):
        torch.ops.tessera.rows(
            torch.tensor([1]),
            None,
            torch.tensor([1]),
            None,
            [],
            torch.zeros(0),
            "a",
            None,
            None,
            1,
            1,
            "Gone:1",
            False,
            False,
        )
