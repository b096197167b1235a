"""Plans made by hand and trained with torch's optimizers, beside torchrec 1.8.0 and one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from two_sides import OURS, SIDES

from ranks import run_ranks  # isort: skip

TABLES = {"a": 10, "b": 7, "c": 6}
FEATURES = [f"f_{name}" for name in TABLES]


def make_model(side):
    torch.manual_seed(1)
    config = side("modules.embedding_configs").EmbeddingBagConfig
    collection = side("modules.embedding_modules").EmbeddingBagCollection

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.ebc = collection(
                tables=[
                    config(num_embeddings=rows, embedding_dim=4, name=name, feature_names=[f"f_{name}"])
                    for name, rows in TABLES.items()
                ],
                device=torch.device("cpu"),
            )
            self.over = torch.nn.Linear(12, 1)

        def forward(self, features):
            pooled = self.ebc(features)
            return self.over(torch.cat([pooled[name] for name in FEATURES], 1)).square().mean()

    model = Model()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def batch(side, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (12,), generator=generator)
    values = torch.randint(0, 6, (int(lengths.sum()),), generator=generator)
    return side("sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(FEATURES, values, lengths)


def wishes(side):
    plans = side("distributed.sharding_plan")
    return {"a": plans.row_wise(), "b": plans.table_wise(1), "c": plans.column_wise([1, 0])}


def whole_tables(state):
    """Return the tables of a state on every rank."""
    found = {}
    for name, rows in TABLES.items():
        value = state[f"ebc.embedding_bags.{name}.weight"]
        whole = torch.zeros(rows, 4)
        for shard in value.local_shards():
            (row, column), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            whole[row : row + height, column : column + width] = shard.tensor
        dist.all_reduce(whole)
        found[name] = whole
    return found


def fill(dmp, model):
    """Give the shards the rows of a model; torchrec does not keep them."""
    for name, value in dmp.state_dict().items():
        whole = model.get_parameter(name).detach()
        if not hasattr(value, "local_shards"):
            value.copy_(whole)
            continue
        for shard in value.local_shards():
            (row, column), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(whole[row : row + height, column : column + width])


def train(rank, side, make_optimizer):
    model = make_model(side)
    sharder = side("distributed.embeddingbag").EmbeddingBagCollectionSharder()
    plans, types = side("distributed.sharding_plan"), side("distributed.types")
    tables = plans.construct_module_sharding_plan(model.ebc, wishes(side), sharder, 2, 2, "cpu")
    assert {sharding.compute_kernel for sharding in tables.values()} == {"dense"}
    dmp = side("distributed.model_parallel").DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=types.ShardingPlan({"ebc": tables}),
        sharders=[sharder],
    )
    with torch.no_grad():
        fill(dmp, make_model(side))
    optimizer = make_optimizer(dmp.parameters())
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = dmp(batch(side, 10 * step + rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, whole_tables(dmp.state_dict())


def compare(rank, name):
    optimizers = {
        "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }
    (losses, tables), (their_losses, their_tables) = [train(rank, side, optimizers[name]) for side in SIDES]
    assert losses == pytest.approx(their_losses, rel=1e-5)
    whole = make_model(OURS)
    reference = optimizers[name](whole.parameters())
    for step in range(4):
        reference.zero_grad()
        (sum(whole(batch(OURS, 10 * step + r)) for r in range(2)) / 2).backward()
        reference.step()
    for table, rows in tables.items():
        torch.testing.assert_close(rows, their_tables[table], rtol=1e-5, atol=1e-6)
        weight = whole.ebc.embedding_bags[table].weight.detach()
        torch.testing.assert_close(rows, weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adagrad", "sgd"])
def test_the_users_optimizer_steps_the_tables(name):
    run_ranks(2, compare, name, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"})


def test_kernels():
    """Fused only where an optimizer was set to run in backward."""
    for side in SIDES:
        plans = side("distributed.sharding_plan")
        for mark, kernel in ((False, "dense"), (True, "fused")):
            model = make_model(side)
            if mark:
                side("optim.apply_optimizer_in_backward").apply_optimizer_in_backward(
                    torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.1}
                )
            plan = plans.construct_module_sharding_plan(
                model.ebc, wishes(side), local_size=2, world_size=2, device_type="cpu"
            )
            assert {sharding.compute_kernel for sharding in plan.values()} == {kernel}
