"""Whatever the planner plans trains as one process does."""

from __future__ import annotations

import random

import pytest
import tessera._C
import torch
from ranks import run_ranks
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.model_parallel import DistributedModelParallel, dense_parameters
from tessera.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tessera.modules.embedding_modules import EmbeddingBagCollection
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn

if not hasattr(tessera._C, "planner"):
    pytest.skip("the library was built without the planner", allow_module_level=True)
from tessera.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from tessera.distributed.planner.proposers import GreedyProposer

ENVIRONMENT = {"TESSERA_PROFILE": "assume"}
CUTS = ["table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard"]


def random_tables(seed):
    """Return tables (name, rows, columns, pooling) and what is asked of them."""
    pick = random.Random(seed)
    tables, constraints = [], {}
    for i in range(pick.randint(1, 5)):
        name = f"t{i}"
        pooling = pick.choice([PoolingType.SUM, PoolingType.MEAN])
        tables.append((name, pick.choice([1, 5, 40, 300]), 4 * pick.randint(1, 6), pooling))
        if pick.random() < 0.7:
            constraints[name] = ParameterConstraints(
                sharding_types=pick.sample(CUTS, pick.randint(1, 3)),
                pooling_factors=[pick.choice([1.0, 30.0])],
            )
    return tables, constraints


class Model(nn.Module):
    def __init__(self, tables):
        super().__init__()
        torch.manual_seed(7)
        self.names = [f"f_{name}" for name, *_ in tables]
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(rows, dim, name, feature_names=[f"f_{name}"], pooling=pooling)
                for name, rows, dim, pooling in tables
            ],
            device=torch.device("cpu"),
        )
        self.over = nn.Linear(sum(dim for _, _, dim, _ in tables), 1)

    def forward(self, features):
        pooled = self.ebc(features)
        return self.over(torch.cat([pooled[name] for name in self.names], 1)).square().mean()


def batch(tables, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(tables), 3), generator=generator)
    values = [
        torch.randint(0, rows, (int(own.sum()),), generator=generator)
        for (_, rows, _, _), own in zip(tables, lengths, strict=True)
    ]
    names = [f"f_{name}" for name, *_ in tables]
    return KeyedJaggedTensor.from_lengths_sync(names, torch.cat(values), lengths.flatten())


def train(rank, world, seeds, is_loop):
    kinds = set()
    for seed in seeds:
        tables, constraints = random_tables(seed)
        sharders = [EmbeddingBagCollectionSharder({"learning_rate": 0.5})]
        model, whole = Model(tables), Model(tables)
        local = 2 if world == 4 else world
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=world, compute_device="cpu", local_world_size=local),
            constraints=constraints,
            proposer=GreedyProposer() if is_loop else None,
            debug=False,
        )
        plan = planner.collective_plan(model, sharders)
        kinds |= {sharding.sharding_type for sharding in plan.plan["ebc"].values()}
        dmp = DistributedModelParallel(model, plan=plan, sharders=sharders)
        optimizer = torch.optim.SGD(dense_parameters(dmp), lr=0.5)
        reference = torch.optim.SGD(whole.parameters(), lr=0.5)
        for step in range(2):
            optimizer.zero_grad()
            loss = dmp(batch(tables, rank, step))
            loss.backward()
            optimizer.step()
            reference.zero_grad()
            losses = [whole(batch(tables, r, step)) for r in range(world)]
            (sum(losses) / world).backward()
            reference.step()
            torch.testing.assert_close(loss, losses[rank])
        expected = whole.state_dict()
        for name, rows in model.ebc.gather_tables().items():
            torch.testing.assert_close(rows, expected[f"ebc.embedding_bags.{name}.weight"])
    return kinds


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_plan_trains_as_one_process(world):
    env = {"LOCAL_WORLD_SIZE": "2"} if world == 4 else None  # two hosts
    kinds = run_ranks(world, train, world, range(8), False, env=env)[0]
    assert len(kinds) >= (1 if world == 1 else 3), kinds


def test_plans_of_proposals_do_too():
    run_ranks(2, train, 2, range(4), True)
