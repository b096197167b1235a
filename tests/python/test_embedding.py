"""Rows of single ids of tables over ranks, through Python: equal to one process."""

from __future__ import annotations

import copy
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
from four_tables import NAMES, batch, check_loads, check_same_optimizer_state, four_tables, shard_with
from ranks import run_ranks
from tessera import checkpoint
from tessera.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    create_sharding_infos_by_sharding,
    get_ec_index_dedup,
    set_ec_index_dedup,
)
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    dense_parameters,
)
from tessera.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_module_to_default_sharders,
    row_wise,
    table_row_wise,
    table_wise,
)
from tessera.distributed.types import QuantizedCommCodec, QuantizedCommCodecs, ShardingEnv, ShardingPlan
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn

MIXED = {"a": row_wise(), "b": column_wise([1, 0, 1]), "c": data_parallel(), "d": table_wise(1)}
OTHER = {"a": column_wise([0, 1]), "b": table_wise(0), "c": row_wise(), "d": table_row_wise(0)}


def collection(device="cpu", **options):
    torch.manual_seed(7)
    return EmbeddingCollection(four_tables(EmbeddingConfig), device=torch.device(device), **options)


def shard(wishes, fused_params=None, ec=None, **options):
    return shard_with(EmbeddingCollectionSharder(fused_params, **options), ec or collection(), wishes)


def loss_of(rows):
    return sum((rows[name].values() * (k + 1)).square().sum() for k, name in enumerate(NAMES))


def assert_rows(got, expected):
    assert sorted(got) == sorted(expected)
    for name, rows in expected.items():
        torch.testing.assert_close(got[name].values(), rows.values())
        assert torch.equal(got[name].lengths(), rows.lengths())
        ids, others = got[name].weights_or_none(), rows.weights_or_none()
        assert (ids is None and others is None) or torch.equal(ids, others)


def check_pass(rank):
    """Two steps of plain tables, of ids that are sent once, and with the ids in the results."""
    for wishes, is_once, need_indices in ((MIXED, False, True), (OTHER, False, False), (OTHER, True, True)):
        whole = collection(need_indices=need_indices)
        ec = collection(need_indices=need_indices)
        sharded = shard(wishes, {"learning_rate": 0.1}, ec, use_index_dedup=is_once)
        assert sharded.need_indices() is need_indices
        stepped = [name for name in "abcd" if wishes[name] is not MIXED["c"]]  # replicas are dense
        rule = torch.optim.SGD([whole.embeddings[name].weight for name in stepped], lr=0.1)
        for step in range(2):
            sizes = [3 + step, 2 * step, 1, 4 * step]  # first none on ranks 1 and 3
            rows = sharded(batch(rank, sizes[rank]))
            assert_rows(rows, whole(batch(rank, sizes[rank])))
            loss_of(rows).backward()
            whole.zero_grad()
            world = dist.get_world_size()
            for r in range(world):
                (loss_of(whole(batch(r, sizes[r]))) / world).backward()
            rule.step()
        for name, rows in sharded.gather_tables().items():
            torch.testing.assert_close(rows, whole.embeddings[name].weight.detach())


def check_dedup(rank):
    assert not get_ec_index_dedup()
    with pytest.warns(DeprecationWarning, match="use_index_dedup"):
        set_ec_index_dedup(True)
    everywhere = shard(OTHER)
    with pytest.warns(DeprecationWarning):
        set_ec_index_dedup(False)
    for module, is_once in (
        (everywhere, True),
        (shard(OTHER), False),
        (shard(OTHER, use_index_dedup=True), True),
        (copy.deepcopy(everywhere), True),
    ):
        assert module._use_index_dedup is is_once
        assert_rows(module(batch(rank)), collection()(batch(rank)))
    # One id 4096 times: its gradients leave one by one, or as one sum, which 16 bits cannot hold.
    codecs = QuantizedCommCodecs(QuantizedCommCodec("fp32"), QuantizedCommCodec("fp16"))
    features = KeyedJaggedTensor.from_lengths_sync(
        ["f", "g", "h", "i"],
        torch.zeros((1 - rank) * 4096, dtype=torch.long),
        torch.tensor([0, 0, 0, (1 - rank) * 4096]),
    )
    for is_once in (False, True):
        sharded = shard(
            MIXED,
            {"learning_rate": 1.0},
            use_index_dedup=is_once,
            qcomm_codecs_registry={"SEQUENCE_EMBEDDINGS_ALL_TO_ALL": codecs},
        )
        before = sharded.gather_tables()["d"]
        (40 * sharded(features)["i"].values()).sum().backward()
        moved = (before - sharded.gather_tables()["d"])[0, 0].item()
        assert moved < 70_000 if is_once else moved == pytest.approx(4096 * 40 / 2, rel=1e-4)


def check_state(rank):
    source = shard(MIXED)
    whole = source.gather_tables()
    state = source.state_dict()
    assert set(state) == {f"embeddings.{name}.weight" for name in "abcd"}
    assert [part.tensor.shape for part in state["embeddings.a.weight"].local_shards()] == [(5, 4)]
    names = [name for name, _ in source.named_parameters()]
    assert ("embeddings.b.weight_1" in names) == (rank == 1)
    others = (MIXED, OTHER, {name: table_wise(0) for name in "abcd"})
    check_loads(state, whole, map(shard, others))
    unsharded = collection()
    with torch.no_grad():
        for weight in unsharded.parameters():
            weight += 1
    target = shard(OTHER)
    target.load_state_dict(unsharded.state_dict())
    back = shard(MIXED)
    back.load_state_dict(target.state_dict())
    for name, rows in back.gather_tables().items():
        assert torch.equal(rows, whole[name] + 1), name
    with pytest.raises(ValueError, match=r"table 'd' is \[1, 2\] in the state and \[6, 2\] here"):
        source.load_state_dict({"embeddings.d.weight": torch.zeros(1, 2)}, strict=False)


def check_optimizers(rank):
    """One table with a rule of its own, set by torch; others by fused_params; one dense. Then a copy."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    ec = collection()
    _apply_optimizer_in_backward(torch.optim.SGD, [ec.embeddings["a"].weight], {"lr": 0.25})
    wishes = {
        "a": row_wise(),
        "b": column_wise([1, 0]),
        "c": row_wise(),
        "d": table_wise(1, compute_kernel="dense"),
    }
    sharded = shard(wishes, {"optimizer": "exact_adagrad", "learning_rate": 0.1, "eps": 1e-3}, ec)
    assert len(sharded.fused_optimizer.optimizers) == 2  # the feature f has tables of both
    whole = collection()
    weights = {name: table.weight for name, table in whole.embeddings.items()}
    rules = [
        torch.optim.SGD([weights["a"]], lr=0.25),
        torch.optim.Adagrad([weights["b"], weights["c"]], lr=0.1, eps=1e-3),
    ]
    for _ in range(2):
        rows = sharded(batch(rank))
        assert sorted(rows) == sorted(NAMES)
        loss_of(rows).backward()
        whole.zero_grad()
        for r in range(2):
            (loss_of(whole(batch(r))) / 2).backward()
        for rule in rules:
            rule.step()
    for name, rows in sharded.gather_tables().items():
        torch.testing.assert_close(rows, weights[name].detach())
    if rank == 1:
        own = dict(sharded.named_parameters())["embeddings.d.weight"]
        torch.testing.assert_close(own.grad, 2 * weights["d"].grad)
    twin = copy.deepcopy(sharded)
    check_same_optimizer_state(sharded, twin)
    before = twin.gather_tables()
    loss_of(sharded(batch(rank))).backward()
    assert torch.equal(twin.gather_tables()["b"], before["b"])
    assert not torch.equal(sharded.gather_tables()["b"], before["b"])


class Model(nn.Module):
    """Both collections, and a layer over what they give."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.ec = collection(device)
        tables = [
            EmbeddingBagConfig(10, 4, "p", feature_names=["f", "g"]),
            EmbeddingBagConfig(7, 2, "q", feature_names=["h"], pooling=PoolingType.MEAN),
        ]
        self.ebc = EmbeddingBagCollection(tables, device=torch.device(device))
        self.over = nn.Linear(10, 1, device=device)

    def forward(self, features):
        pooled = self.ebc(features)
        whole = self.over(torch.cat([pooled[name] for name in "fgh"], 1)).square().mean()
        return whole + loss_of(self.ec(features)) / 10


WISHES = {
    "ec": {**MIXED, "c": row_wise()},
    "ebc": {"p": row_wise(), "q": column_wise([0, 1])},
}


def plan_of(model, sharders=(None, None), wishes=WISHES):
    return ShardingPlan(
        {
            path: construct_module_sharding_plan(
                getattr(model, path), wishes[path], sharder, device_type="cpu"
            )
            for path, sharder in zip(wishes, sharders, strict=True)
        }
    )


def check_model(rank):
    """Two accumulated and clipped passes, then a step in backward, equal one process."""
    for gradients in ("sparse", "fused"):
        torch.manual_seed(3)
        model, whole = Model(), Model()
        whole.load_state_dict(model.state_dict())
        params = {"learning_rate": 0.1, "gradients": gradients}
        sharders = [EmbeddingCollectionSharder(params), EmbeddingBagCollectionSharder(params)]
        dmp = DistributedModelParallel(
            model,
            plan=plan_of(model, sharders),
            sharders=sharders,
            data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
        )
        optimizer = torch.optim.SGD(dense_parameters(dmp), lr=0.1)
        if gradients == "sparse":
            with dmp.no_sync():
                dmp(batch(rank + 2)).backward()
        dmp(batch(rank)).backward()
        for r in range(4 if gradients == "sparse" else 2):
            (whole(batch(r)) / 2).backward()
        if gradients == "sparse":
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
            assert norm > 0.5
            assert dmp.clip_grad_norm_(0.5) == pytest.approx(norm, rel=1e-5)
        optimizer.step()
        dmp.fused_optimizer.step()
        torch.optim.SGD(whole.parameters(), lr=0.1).step()
        expected = whole.state_dict()
        state = dmp.state_dict()
        assert set(state) == set(expected)
        torch.testing.assert_close(state["over.weight"], expected["over.weight"])
        for path, prefix in (("ec", "ec.embeddings"), ("ebc", "ebc.embedding_bags")):
            for name, rows in getattr(model, path).gather_tables().items():
                torch.testing.assert_close(rows, expected[f"{prefix}.{name}.weight"])
    meta = Model("meta")
    other = DistributedModelParallel(meta, plan=plan_of(meta, sharders))  # default sharders
    assert not other.load_state_dict(expected).missing_keys
    torch.testing.assert_close(other(batch(rank)), whole(batch(rank)))
    assert {name.split(".")[0] for name in other.fused_optimizer.state_dict()["state"]} == {"ec", "ebc"}
    twin = other.copy(torch.device("cpu"))
    torch.testing.assert_close(twin(batch(rank)), other(batch(rank)))
    balanced = DistributedModelParallel(Model())
    assert set(balanced.plan.plan) == {"ec", "ebc"}
    balanced(batch(rank)).backward()


def model_state(dmp):
    return {"model": dmp.state_dict(), "fused": checkpoint.fused_state(dmp.module)}


def check_checkpoint(rank):
    """A model saved under one plan continues under another, optimizers of rows included."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    params = {"optimizer": "adam", "learning_rate": 0.1}
    sharders = [EmbeddingCollectionSharder(params), EmbeddingBagCollectionSharder(params)]
    first = DistributedModelParallel(Model(), plan=plan_of(Model(), sharders), sharders=sharders)
    for number in range(2):
        first(batch(rank + 2 * number)).backward()
    checkpoint.save(folder[0], 2, model_state(first), dist.group.WORLD)

    wishes = {"ec": OTHER, "ebc": {"p": table_wise(1), "q": row_wise()}}
    meta = Model("meta")
    other = DistributedModelParallel(meta, plan=plan_of(meta, sharders, wishes), sharders=sharders)
    checkpoint.load(folder[0], model_state(other), dist.group.WORLD)
    for path in wishes:
        expected = getattr(first.module, path).gather_tables()
        for name, rows in getattr(other.module, path).gather_tables().items():
            assert torch.equal(rows, expected[name]), name
    for model in (first, other):
        model(batch(rank + 4)).backward()
    for path in wishes:
        expected = getattr(first.module, path).gather_tables()
        for name, rows in getattr(other.module, path).gather_tables().items():
            torch.testing.assert_close(rows, expected[name], rtol=2e-6, atol=2e-6)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def check_errors(rank):
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    ec = collection()
    plan = construct_module_sharding_plan(ec, MIXED, device_type="cpu")
    sharder = EmbeddingCollectionSharder()
    with pytest.raises(ValueError, match=r"sharding\.embedding_collection: the environment has no process"):
        sharder.shard(ec, plan, ShardingEnv.from_local(2, rank))
    with pytest.raises(ValueError, match=r"sharding\.embedding_collection: the plan has no table 'a'"):
        sharder.shard(ec, {name: plan[name] for name in "bcd"}, env)
    with pytest.raises(ValueError, match="the plan has a table 'x' that is not there"):
        sharder.shard(ec, {**plan, "x": plan["a"]}, env)
    with pytest.raises(ValueError, match="gradients are 'DENSE', not 'fused' or 'sparse'"):
        shard(MIXED, {"gradients": "dense"})
    sharded = shard(MIXED)
    values = torch.tensor([0, 99 if rank == 1 else 1])
    bad = KeyedJaggedTensor.from_lengths_sync(["f", "g", "h", "i"], values, torch.tensor([0, 2, 0, 0]))
    with pytest.raises(IndexError, match=r"rank 1.*'g'.*99"):
        sharded(bad).keys()
    missing = KeyedJaggedTensor.from_lengths_sync(["f", "g", "h"], values[:1], torch.tensor([1, 0, 0]))
    with pytest.raises(ValueError, match="'i'"):
        sharded(missing).keys()
    codecs = QuantizedCommCodecs(QuantizedCommCodec("fp16"), QuantizedCommCodec("fp16"))
    coded = shard(MIXED, qcomm_codecs_registry={"SEQUENCE_EMBEDDINGS_ALL_TO_ALL": codecs})
    got, expected = coded(batch(rank))["h"].values(), collection()(batch(rank))["h"].values()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert not torch.equal(got, expected)
    infos = create_sharding_infos_by_sharding(ec, plan, {"learning_rate": 0.5})
    assert list(infos) == ["row_wise", "column_wise", "data_parallel", "table_wise"]
    info = infos["row_wise"][0]
    assert info.embedding_config.pooling == PoolingType.NONE and not info.embedding_config.is_weighted
    assert info.embedding_config.embedding_names == ["f@a", "g"]
    assert info.param is ec.embeddings["a"].weight and info.fused_params["learning_rate"] == 0.5


@pytest.mark.parametrize(
    "body",
    [check_pass, check_dedup, check_state, check_optimizers, check_model, check_checkpoint, check_errors],
)
def test_two_ranks(body):
    run_ranks(2, body)


@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks(world):
    run_ranks(world, check_pass)


def check_one(rank):
    sharded = shard({"a": row_wise(), "b": column_wise([0, 0]), "c": data_parallel(), "d": table_wise(0)})
    assert_rows(sharded(batch(0)), collection()(batch(0)))
    assert sharded.embedding_names_by_table() == [["f@a", "g"], ["h"], ["f@c"], ["i"]]
    assert [config.name for config in sharded.embedding_configs()] == ["a", "b", "c", "d"]
    assert sharded.unsharded_module_type is EmbeddingCollection
    assert isinstance(get_module_to_default_sharders()[EmbeddingCollection], EmbeddingCollectionSharder)
    ctx = sharded.create_context()
    assert isinstance(ctx, EmbeddingCollectionContext)
    pending = sharded.input_dist(ctx, batch(0)).wait().wait()
    assert len(ctx.input_features) == 1
    assert_rows(sharded.compute_and_output_dist(ctx, pending).wait(), collection()(batch(0)))
    # A batch of its own for every feature.
    features = KeyedJaggedTensor.from_lengths_sync(
        ["h", "f", "i", "g"],
        torch.tensor([1, 2, 3, 4]),
        torch.tensor([1, 2, 0, 1]),
        stride_per_key_per_rank=[[1], [1], [2], [0]],
    )
    assert_rows(sharded(features), collection()(features))


def test_one_rank():
    run_ranks(1, check_one)
