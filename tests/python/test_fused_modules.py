"""Collections that are made with an optimizer: the steps of torch's own, alone and over ranks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.distributed.fused_embedding import (
    FusedEmbeddingCollectionSharder,
    ShardedFusedEmbeddingCollection,
)
from tessera.distributed.fused_embeddingbag import (
    FusedEmbeddingBagCollectionSharder,
    ShardedFusedEmbeddingBagCollection,
)
from tessera.distributed.model_parallel import DistributedModelParallel
from tessera.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from tessera.distributed.types import ShardingEnv
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    fuse_embedding_optimizer,
)
from tessera.optim import RowWiseAdagrad
from tessera.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torch import nn

RULES = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1}),
]


def batch(seed: int) -> KeyedJaggedTensor:
    """Every row occurs, as Adam of torch steps all of them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randperm(5, generator=generator) for _ in range(4)])
    return KeyedJaggedTensor.from_lengths_sync(["f", "g"], ids, torch.tensor([3, 7, 6, 4]))


def bag_configs():
    return [
        EmbeddingBagConfig(5, 4, "t", feature_names=["f"]),
        EmbeddingBagConfig(5, 2, "u", feature_names=["g"]),
    ]


def row_configs():
    return [EmbeddingConfig(5, 4, "t", feature_names=["f"]), EmbeddingConfig(5, 4, "u", feature_names=["g"])]


def loss_of(found):
    parts = [found.values()] if isinstance(found, KeyedTensor) else [jt.values() for jt in found.values()]
    return sum((part * torch.arange(1.0, part.numel() + 1).view(part.shape)).sum() for part in parts)


def train(module, steps, optimizer=None, first=0):
    for step in range(first, first + steps):
        if optimizer is not None:
            optimizer.zero_grad()
        loss_of(module(batch(step))).backward()
        if optimizer is not None:
            optimizer.step()


def assert_same_rows(module, other):
    for (name, one), (_, two) in zip(module.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("kind, kwargs", RULES)
def test_steps_of_torchs_optimizer(kind, kwargs):
    for fused, plain, configs in (
        (FusedEmbeddingBagCollection, EmbeddingBagCollection, bag_configs()),
        (FusedEmbeddingCollection, EmbeddingCollection, row_configs()),
    ):
        reference = plain(configs)
        module = fuse_embedding_optimizer(reference, kind, kwargs, torch.device("cpu"))
        assert type(module) is fused and module.optimizer_type() is kind
        assert module.optimizer_kwargs() == kwargs
        assert_same_rows(module, reference)  # they keep their rows
        assert list(module.state_dict()) == list(reference.state_dict())
        train(reference, 3, kind(reference.parameters(), **kwargs))
        train(module, 3)
        assert_same_rows(module, reference)


def test_state_by_name():
    module = FusedEmbeddingBagCollection(bag_configs(), torch.optim.Adam, {"lr": 0.1})
    train(module, 2)
    optimizer = module.fused_optimizer()
    assert list(optimizer.params) == ["t.weight", "u.weight"]
    state = optimizer.state_dict()["state"]
    assert list(state["t.weight"]) == ["t.weight.momentum_1", "t.weight.momentum_2", "t.weight.step"]
    assert state["t.weight"]["t.weight.step"] == 2
    other = FusedEmbeddingBagCollection(bag_configs(), torch.optim.Adam, {"lr": 0.1})
    other.load_state_dict(module.state_dict())
    other.fused_optimizer().load_state_dict(copy.deepcopy(optimizer.state_dict()))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [other, copy.deepcopy(module), torch.load(buffer, weights_only=False)]
    train(module, 2, first=2)
    for each in copies:
        train(each, 2, first=2)
        assert_same_rows(each, module)
    rowwise = FusedEmbeddingBagCollection(bag_configs(), RowWiseAdagrad, {"lr": 0.1})
    state = rowwise.fused_optimizer().state_dict()["state"]
    assert state["u.weight"]["u.weight.momentum_1"].shape == (5,)


def test_a_schedule_changes_the_rate():
    module = FusedEmbeddingBagCollection(bag_configs(), torch.optim.SGD, {"lr": 0.5})
    scheduler = torch.optim.lr_scheduler.StepLR(module.fused_optimizer(), 1, gamma=0.0)
    module.fused_optimizer().step()
    scheduler.step()
    before = copy.deepcopy(module.state_dict())
    train(module, 1, module.fused_optimizer())
    assert all(torch.equal(before[name], rows) for name, rows in module.state_dict().items())


def test_inside_a_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(EmbeddingBagCollection(bag_configs()))
            self.rows = EmbeddingCollection(row_configs(), need_indices=True)

    model = Model()
    assert fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, torch.device("cpu")) is model
    assert (
        type(model.inner[0]) is FusedEmbeddingBagCollection and type(model.rows) is FusedEmbeddingCollection
    )
    assert model.rows.need_indices()


@pytest.mark.parametrize(
    "kind, kwargs", [(torch.optim.Rprop, {}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})]
)
def test_rules_that_are_not_there(kind, kwargs):
    with pytest.raises(ValueError, match="Cannot fuse optimizer_type="):
        FusedEmbeddingBagCollection(bag_configs(), kind, kwargs)


def check_sharded(rank):
    world = dist.get_world_size()
    for fused, sharder, configs in (
        (FusedEmbeddingBagCollection, FusedEmbeddingBagCollectionSharder(), bag_configs()),
        (FusedEmbeddingCollection, FusedEmbeddingCollectionSharder(), row_configs()),
    ):
        torch.manual_seed(1)
        module = fused(configs, torch.optim.Adagrad, {"lr": 0.1})
        reference = copy.deepcopy(module)
        plan = construct_module_sharding_plan(
            module, {"t": row_wise(), "u": row_wise()}, sharder, world, device_type="cpu"
        )
        assert {sharding.compute_kernel for sharding in plan.values()} == {"fused"}
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        sharded = sharder.shard(module, plan, env, torch.device("cpu"))
        assert sharded.unsharded_module_type is fused
        for step in range(3):  # all ranks have the same batch
            loss_of(sharded(batch(step)).wait()).backward()
            loss_of(reference(batch(step))).backward()
        for name, rows in sharded.gather_tables().items():
            torch.testing.assert_close(rows, reference._tables()[name].weight.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_over_ranks(world):
    run_ranks(world, check_sharded)


def check_meta_device(rank):
    """Large tables are described, then made as parts; nobody has to say how they are sharded."""
    for fused, sharded, configs in (
        (FusedEmbeddingBagCollection, ShardedFusedEmbeddingBagCollection, bag_configs()),
        (FusedEmbeddingCollection, ShardedFusedEmbeddingCollection, row_configs()),
    ):
        for config in configs:
            config.init_fn = torch.nn.init.ones_
        module = fused(configs, torch.optim.Adagrad, {"lr": 0.1}, device=torch.device("meta"))
        with pytest.raises(ValueError, match="is on the meta device"):
            module.fused_optimizer()
        assert copy.deepcopy(module).optimizer_kwargs() == {"lr": 0.1}
        whole = fused(configs, torch.optim.Adagrad, {"lr": 0.1})
        model = DistributedModelParallel(module)
        assert type(model.module) is sharded
        for step in range(2):  # all ranks have the same batch
            loss_of(model(batch(step)).wait()).backward()
            loss_of(whole(batch(step))).backward()
        for name, rows in model.module.gather_tables().items():
            torch.testing.assert_close(rows, whole._tables()[name].weight.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_on_the_meta_device(world):
    run_ranks(world, check_meta_device)
