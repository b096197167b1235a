"""Tables over ranks through Python: equal to one process; worlds and types are C++'s and the peers'."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from four_tables import NAMES, batch, check_loads, check_same_optimizer_state, four_tables, shard_with
from ranks import run_ranks
from tessera.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    EmbeddingBagSharder,
    create_sharding_infos_by_sharding,
    replace_placement_with_meta_device,
)
from tessera.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    DMPCollection,
    dense_parameters,
    get_module,
    get_unwrapped_module,
)
from tessera.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tessera.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    QuantizedCommCodec,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)
from tessera.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from tessera.modules.embedding_modules import EmbeddingBagCollection
from tessera.nn.parallel import DistributedDataParallel
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn


def collection(device="cpu", **options):
    torch.manual_seed(7)
    tables = four_tables(EmbeddingBagConfig, pooling=PoolingType.MEAN)
    return EmbeddingBagCollection(tables, device=torch.device(device), **options)


MIXED = {"a": row_wise(), "b": row_wise(), "c": column_wise([1, 0]), "d": table_wise(1)}


def shard(wishes, fused_params=None, ebc=None, **options):
    return shard_with(EmbeddingBagCollectionSharder(fused_params, **options), ebc or collection(), wishes)


def check_pass(rank, samples):
    world = dist.get_world_size()
    whole = collection()
    sharded = shard(MIXED, {"learning_rate": 0.5})
    pooled = sharded(batch(rank, samples[rank]))
    expected = whole(batch(rank, samples[rank]))
    for name in NAMES:
        torch.testing.assert_close(pooled[name], expected[name])
    sum((pooled[name] * (k + 1)).sum() for k, name in enumerate(NAMES)).backward()
    for r in range(world):
        pooled = whole(batch(r, samples[r]))
        (sum((pooled[name] * (k + 1)).sum() for k, name in enumerate(NAMES)) / world).backward()
    for name, rows in sharded.gather_tables().items():
        weight = whole.embedding_bags[name].weight
        torch.testing.assert_close(rows, (weight - 0.5 * weight.grad).detach())


@pytest.mark.parametrize("samples", [[3, 3], [3, 0, 5], [2, 5, 0, 1]])  # of each rank
def test_sharded_equals_whole(samples):
    run_ranks(len(samples), check_pass, samples)


def check_state(rank):
    source = shard(MIXED)
    whole = source.gather_tables()
    state = source.state_dict()
    assert set(state) == {f"embedding_bags.{name}.weight" for name in "abcd"}
    assert [part.tensor.shape for part in state["embedding_bags.a.weight"].local_shards()] == [(5, 4)]
    others = [
        MIXED,
        {"a": column_wise([0, 1, 0]), "b": table_wise(1), "c": row_wise(), "d": data_parallel()},
        {name: table_wise(0) for name in "abcd"},
    ]
    check_loads(state, whole, map(shard, others))
    target = shard(others[1])
    target.load_state_dict({f"embedding_bags.{name}.weight": rows + 1 for name, rows in whole.items()})
    assert torch.equal(target.gather_tables()["a"], whole["a"] + 1)
    back = shard(MIXED)
    back.load_state_dict(target.state_dict())  # column-wise with two parts on a rank, replicas
    assert torch.equal(back.gather_tables()["d"], whole["d"] + 1)
    assert torch.equal(back.gather_tables()["a"], whole["a"] + 1)
    names = [name for name, _ in target.named_parameters()]
    assert ("embedding_bags.a.weight_1" in names) == (rank == 0)
    del state["embedding_bags.a.weight"]
    assert source.load_state_dict(state, strict=False).missing_keys == ["embedding_bags.a.weight"]
    wrong = {"embedding_bags.d.weight": torch.zeros(1, 2)}
    with pytest.raises(ValueError, match=r"table 'd' is \[1, 2\] in the state and \[6, 2\] here"):
        source.load_state_dict(wrong, strict=False)


def check_optimizers(rank):
    """Two tables with rules of their own, set by torch; the others by fused_params; one dense."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    def prepared():
        ebc = collection()
        _apply_optimizer_in_backward(torch.optim.SGD, [ebc.embedding_bags["a"].weight], {"lr": 0.25})
        return ebc

    wishes = {**MIXED, "d": table_wise(1, compute_kernel="dense")}
    sharded = shard(wishes, {"optimizer": "exact_adagrad", "learning_rate": 0.1, "eps": 1e-3}, prepared())
    assert len(sharded.fused_optimizer.optimizers) == 2
    whole = collection()
    weights = {name: table.weight for name, table in whole.embedding_bags.items()}
    optimizers = [
        torch.optim.SGD([weights["a"]], lr=0.25),
        torch.optim.Adagrad([weights["b"], weights["c"]], lr=0.1, eps=1e-3),
    ]
    for _ in range(2):
        pooled = sharded(batch(rank))
        assert sorted(pooled.keys()) == sorted(NAMES)
        sum(pooled[name].square().sum() for name in pooled.keys()).backward()  # noqa: SIM118
        whole.zero_grad()
        for r in range(2):
            pooled = whole(batch(r))
            (pooled.values().square().sum() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, rows in sharded.gather_tables().items():
        torch.testing.assert_close(rows, weights[name].detach())
    if rank == 1:  # the dense table left its gradients, of two passes
        own = dict(sharded.named_parameters())["embedding_bags.d.weight"]
        torch.testing.assert_close(own.grad, 2 * weights["d"].grad)
    twin = copy.deepcopy(sharded)
    check_same_optimizer_state(sharded, twin)
    sharded.fused_optimizer.param_groups[0]["lr"] = 0.0
    sharded.fused_optimizer.zero_grad()
    before = sharded.gather_tables()
    sharded(batch(rank)).values().sum().backward()
    after = sharded.gather_tables()
    assert torch.equal(before["a"], after["a"]) and not torch.equal(before["b"], after["b"])
    assert torch.equal(twin.gather_tables()["b"], before["b"])


class Model(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.ebc = collection(device)
        self.over = nn.Linear(20, 1, device=device)

    def forward(self, features):
        pooled = self.ebc(features)
        return self.over(torch.cat([pooled[name] for name in NAMES], 1)).square().mean()


def model_plan(wishes, model, sharder=None):
    return ShardingPlan(
        {"ebc": construct_module_sharding_plan(model.ebc, wishes, sharder, device_type="cpu")}
    )


def check_model(rank):
    torch.manual_seed(3 + rank)  # replicas start as on rank 0
    wishes = {**MIXED, "d": data_parallel()}
    sharders = [EmbeddingBagCollectionSharder({"learning_rate": 0.5})]
    model = Model()
    dmp = DistributedModelParallel(model, plan=model_plan(wishes, model, *sharders), sharders=sharders)
    assert dmp.module is model and isinstance(get_module(dmp), DistributedDataParallel)
    assert get_unwrapped_module(dmp) is model
    whole = Model()
    with torch.no_grad():
        whole.over.load_state_dict(model.over.state_dict())
        weights = [whole.over.weight, whole.over.bias]
        for weight in weights:
            dist.broadcast(weight, 0)
    optimizer = torch.optim.SGD(dense_parameters(dmp), lr=0.5)
    reference = torch.optim.SGD(whole.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = dmp(batch(rank))
        loss.backward()
        optimizer.step()
        reference.zero_grad()
        losses = [whole(batch(r)) for r in range(2)]
        (sum(losses) / 2).backward()
        reference.step()
        torch.testing.assert_close(loss, losses[rank])
    expected = whole.state_dict()
    state = dmp.state_dict()
    assert set(state) == set(expected)
    assert {name for name, _ in dmp.named_parameters()} >= set(expected)
    torch.testing.assert_close(state["over.weight"], expected["over.weight"])
    torch.testing.assert_close(state["ebc.embedding_bags.d.weight"], expected["ebc.embedding_bags.d.weight"])
    for name, rows in model.ebc.gather_tables().items():
        torch.testing.assert_close(rows, expected[f"ebc.embedding_bags.{name}.weight"])

    twin = dmp.copy(torch.device("cpu"))
    assert twin.module is not model
    torch.testing.assert_close(twin(batch(rank)), dmp(batch(rank)))
    meta = Model("meta")
    other = DistributedModelParallel(meta, plan=model_plan(MIXED, meta, *sharders), sharders=sharders)
    assert not meta.over.weight.is_meta
    assert not any(parameter.is_meta for parameter in other.parameters())
    assert not torch.isnan(other(batch(rank)))
    assert not other.load_state_dict(expected).missing_keys
    torch.testing.assert_close(other(batch(rank)), whole(batch(rank)))
    other.load_state_dict(state)
    fused = other.fused_optimizer
    assert isinstance(fused, torch.optim.Optimizer)
    assert next(iter(fused.params)) == "ebc.embedding_bags.a.weight"
    assert set(fused.state_dict()["state"]) == set(fused.params)
    schedule = torch.optim.lr_scheduler.StepLR(fused, 1, gamma=0.5)
    fused.step()
    schedule.step()
    assert [group["lr"] for group in fused.param_groups] == [0.25]
    assert other.sparse_grad_parameter_names() == []
    with other.no_sync():
        other(batch(rank)).backward()

    default = DistributedModelParallel(Model())  # the planner's plan, the same on both ranks
    assert list(default.plan.plan["ebc"]) == ["a", "b", "c", "d"]
    plans = [None] * dist.get_world_size()
    dist.all_gather_object(plans, str(default.plan))
    assert len(set(plans)) == 1
    assert (default.plan_certificate is not None) == (rank == 0)
    torch.testing.assert_close(default(batch(rank)), Model()(batch(rank)))
    assert {sharding.compute_kernel for sharding in default.plan.plan["ebc"].values()} == {"dense"}
    default(batch(rank)).backward()
    with pytest.raises(ValueError, match=r"'ebc\.a' is dense, and a rank without batches steps no optimizer"):
        default.join()
    with pytest.warns(UserWarning, match="table 'a' has the kernel dense"):
        DistributedModelParallel(Model(), plan=default.plan, sharders=sharders)
    plain = Model()  # rank 0 has two parts of a table, and so more parameters
    several = model_plan({**MIXED, "a": column_wise([0, 1, 0])}, plain)
    DistributedModelParallel(plain, plan=several)(batch(rank)).backward()
    plain = Model()
    wrong = ShardingPlan({"none": model_plan(MIXED, plain).plan["ebc"]})
    with pytest.raises(ValueError, match="the plan has a module 'none' that is not there"):
        DistributedModelParallel(Model(), plan=wrong)
    wrong = ShardingPlan({"over": model_plan(MIXED, plain).plan["ebc"]})
    with pytest.raises(ValueError, match="there is no sharder for 'over', a Linear"):
        DistributedModelParallel(Model(), plan=wrong)
    with pytest.raises(ValueError, match="'fp8' is not one of fp16, bf16"):
        DefaultDataParallelWrapper(allreduce_comm_precision="fp8")


def check_collection(rank):
    """Two groups of two ranks, synchronised after every step, equal one process."""
    torch.manual_seed(3)
    model, whole = Model(), Model()
    whole.load_state_dict(model.state_dict())
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.5})
    wishes = {"a": row_wise(), "b": table_wise(1), "c": column_wise([1, 0]), "d": data_parallel()}
    plan = ShardingPlan({"ebc": construct_module_sharding_plan(model.ebc, wishes, sharder, 2, 2, "cpu")})
    arguments = (torch.device("cpu"), plan, 4, 2, dist.group.WORLD)
    dmp = DMPCollection(model, *arguments, sharders=[sharder])
    assert dmp._env.world_size == 2 and dmp._env.rank == rank // 2
    optimizer = torch.optim.SGD(dense_parameters(dmp), lr=0.5)
    reference = torch.optim.SGD(whole.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        dmp(batch(10 * step + rank)).backward()
        optimizer.step()
        dmp.sync()
        reference.zero_grad()
        (sum(whole(batch(10 * step + r)) for r in range(4)) / 4).backward()
        reference.step()
    expected = whole.state_dict()
    torch.testing.assert_close(model.over.weight, whole.over.weight)
    for name, rows in model.ebc.gather_tables().items():
        torch.testing.assert_close(rows, expected[f"ebc.embedding_bags.{name}.weight"])
    other = DMPCollection(Model("meta"), *arguments, sharders=[sharder])
    other.load_state_dict(dmp.state_dict())  # sharded tensors of a group that is not the world
    for name, rows in other.module.ebc.gather_tables().items():
        torch.testing.assert_close(rows, expected[f"ebc.embedding_bags.{name}.weight"])
    calls = []
    dmp.set_all_reduce_hook(lambda tensors: calls.append(len(tensors)))
    dmp.sync(include_optimizer_state=False)
    assert calls[0] >= 3
    with pytest.raises(ValueError, match="4 ranks, in a group of 4, cannot be dealt to groups of 3"):
        DMPCollection(Model(), torch.device("cpu"), plan, 4, 3, dist.group.WORLD)


def test_replicas_of_a_sharded_model():
    run_ranks(4, check_collection)


def check_types(rank):
    """Every rank says the same of a table, also one without a part of it."""
    tables = [EmbeddingBagConfig(10, 4, "h", DataType.FP16, ["f"])]
    ebc = EmbeddingBagCollection(tables)
    sharded = shard({"h": table_wise(1)}, {"optimizer": "rowwise_adagrad"}, ebc)
    whole = sharded.state_dict()["embedding_bags.h.weight"]
    assert whole.dtype == whole.metadata().tensor_properties.dtype == torch.float16
    state = sharded.fused_optimizer.state_dict()["state"]
    assert len(state) == rank  # as in the peer, a rank has the state of tables of which it has a part
    for entries in state.values():
        assert entries["h.momentum1"].dtype == torch.float32 and list(entries["h.momentum1"].shape) == [10]
    for parameter in sharded.parameters():
        assert parameter.dtype == torch.float16
        assert hasattr(parameter, "_in_backward_optimizers") == (rank == 1)
    halves = shard({"h": column_wise([1, 0])}, {"optimizer": "rowwise_adagrad"}, ebc)
    state = halves.fused_optimizer.state_dict()["state"]["embedding_bags.h.weight"]["h.momentum1"]
    assert list(state.shape) == [20]  # one number per row and part of the columns
    assert state.local_shards()[0].metadata.shard_offsets == [10 * (1 - rank)]


def check_accumulation(rank):
    """Two passes and one clipped step of sparse gradients equal one process with everything."""
    torch.manual_seed(5)
    model = Model()
    whole = Model()
    whole.over.load_state_dict(model.over.state_dict())
    sharders = [EmbeddingBagCollectionSharder({"learning_rate": 0.5, "gradients": "sparse"})]
    wrapper = DefaultDataParallelWrapper(static_graph=False)
    dmp = DistributedModelParallel(
        model, plan=model_plan(MIXED, model, *sharders), sharders=sharders, data_parallel_wrapper=wrapper
    )
    optimizer = torch.optim.SGD(dense_parameters(dmp), lr=0.5)
    with dmp.no_sync():
        dmp(batch(rank)).backward()
    dmp(batch(rank + 2)).backward()
    for r in range(4):
        (whole(batch(r)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    assert abs(dmp.clip_grad_norm_(0.01) - norm.item()) < 1e-6
    optimizer.step()
    dmp.fused_optimizer.step()
    dmp.fused_optimizer.zero_grad()
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    expected = whole.state_dict()
    torch.testing.assert_close(dmp.state_dict()["over.weight"], expected["over.weight"])
    for name, rows in model.ebc.gather_tables().items():
        torch.testing.assert_close(rows, expected[f"ebc.embedding_bags.{name}.weight"])


def check_wrapper(rank):
    """Buffers stay with their rank, and what the wrapper is told goes on to the one that averages."""

    class Counting(Model):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, features):
            self.seen += rank + 1
            return super().forward(features)

    for options, seen in (
        ({}, 2.0 * (rank + 1)),
        ({"ddp_kwargs": {"forward_sync_buffers": True}}, rank + 2.0),
    ):
        model = Counting()
        wrapper = DefaultDataParallelWrapper(params_to_ignore=["over.bias"], **options)
        dmp = DistributedModelParallel(model, plan=model_plan(MIXED, model), data_parallel_wrapper=wrapper)
        for _ in range(2):
            (dmp(batch(rank)) * (rank + 1)).backward()
        assert model.seen.item() == seen
        for parameter, is_averaged in ((model.over.weight, True), (model.over.bias, False)):
            both = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(both, parameter.grad)
            assert torch.equal(*both) == is_averaged
    with pytest.raises(ValueError, match="params_to_ignore names 'under', which is no parameter"):
        wrapper = DefaultDataParallelWrapper(params_to_ignore=["under"])
        plain = Model()
        DistributedModelParallel(plain, plan=model_plan(MIXED, plain), data_parallel_wrapper=wrapper)


def check_bag(rank):
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=False)
    ids, offsets = torch.tensor([1, 8, 3, 3]) - rank, torch.tensor([0, 2, 2])
    for wish in (row_wise(), table_wise(1), column_wise([1, 0])):
        sharder = EmbeddingBagSharder({"learning_rate": 1.0})
        plan = construct_module_sharding_plan(bag, {"weight": wish}, sharder, device_type="cpu")
        sharded = sharder.shard(bag, plan, ShardingEnv.from_process_group(dist.group.WORLD))
        torch.testing.assert_close(sharded(ids, offsets).wait(), bag(ids, offsets).detach())
        weights = torch.tensor([0.5, 2.0, -1.0, 3.0])
        got = sharded(ids, offsets, per_sample_weights=weights)
        torch.testing.assert_close(got.wait(), bag(ids, offsets, weights).detach())
        torch.testing.assert_close(sharded(ids.view(2, 2)).wait(), bag(ids.view(2, 2)).detach())
        assert list(sharded.state_dict()) == ["weight"]
        assert [name for name, _ in sharded.named_parameters()] == ["weight"]
        sharded.load_state_dict({"weight": torch.ones(9, 4)})
        assert sharded(ids, offsets).wait().tolist() == [[2.0] * 4, [0.0] * 4, [2.0] * 4]
    with pytest.raises(ValueError, match="give offsets with 1-D ids"):
        sharded(ids)
    with pytest.raises(ValueError, match="mode 'max'"):
        sharder.shard(
            nn.EmbeddingBag(2, 2, mode="max"), plan, ShardingEnv.from_process_group(dist.group.WORLD)
        )


def check_errors(rank):
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    ebc = collection()
    plan = construct_module_sharding_plan(ebc, MIXED, device_type="cpu")
    sharder = EmbeddingBagCollectionSharder()
    with pytest.raises(ValueError, match="the environment has no process group"):
        sharder.shard(ebc, plan, ShardingEnv.from_local(2, rank))
    with pytest.raises(ValueError, match="the plan has no table 'a'"):
        sharder.shard(ebc, {name: plan[name] for name in "bcd"}, env)
    with pytest.raises(ValueError, match="the plan has a table 'x' that is not there"):
        sharder.shard(ebc, {**plan, "x": plan["a"]}, env)
    with pytest.raises(ValueError, match="gradients are 'DENSE', not 'fused' or 'sparse'"):
        shard(MIXED, {"gradients": "dense"})
    sharded = shard(MIXED)
    values = torch.tensor([0, 99 if rank == 1 else 1])
    bad = KeyedJaggedTensor.from_lengths_sync(["f", "g", "h", "i"], values, torch.tensor([0, 2, 0, 0]))
    with pytest.raises(IndexError, match=r"rank 1.*'g'.*99"):
        sharded(bad)
    codecs = QuantizedCommCodecs(QuantizedCommCodec("fp16"), QuantizedCommCodec("fp16"))
    coded = shard(MIXED, qcomm_codecs_registry={"POOLED_EMBEDDINGS_ALL_TO_ALL": codecs})
    expected = collection()(batch(rank))
    pooled = coded(batch(rank))
    torch.testing.assert_close(pooled["i"], expected["i"], rtol=1e-3, atol=1e-3)
    away = "i" if rank == 0 else "h"
    assert not torch.equal(pooled[away], expected[away])
    spec = EnumerableShardingSpec(
        [ShardMetadata(shard_offsets=[0, 0], shard_sizes=[6, 2], placement="rank:1/cpu")]
    )
    infos = create_sharding_infos_by_sharding(
        ebc, {**plan, "d": ParameterSharding("table_wise", "fused", [1], spec)}, "embedding_bags.", None
    )
    assert list(infos) == ["row_wise", "column_wise", "table_wise"]
    replace_placement_with_meta_device(infos["table_wise"])
    assert str(spec.shards[0].placement) == "rank:1/meta"


@pytest.mark.parametrize(
    "body",
    [
        check_state,
        check_optimizers,
        check_model,
        check_types,
        check_accumulation,
        check_wrapper,
        check_bag,
        check_errors,
    ],
)
def test_two_ranks(body):
    run_ranks(2, body)


def test_one_rank():
    run_ranks(1, check_one)


def check_one(rank):
    sharded = shard({"a": row_wise(), "b": row_wise(), "c": column_wise([0, 0]), "d": data_parallel()})
    expected = collection()(batch(0))
    pooled = sharded(batch(0))
    for name in expected.keys():  # noqa: SIM118
        torch.testing.assert_close(pooled[name], expected[name])
