"""Pipelines over managed collision: ids travel ahead, and come and go in the order of batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from tessera.distributed.model_parallel import DistributedModelParallel, dense_parameters
from tessera.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tessera.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from tessera.distributed.types import ShardingEnv, ShardingPlan
from tessera.modules.embedding_configs import EmbeddingBagConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection
from tessera.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from tessera.modules.mc_modules import (
    GrowingManagedCollisionModule,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn

PIPELINES = [TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist]
FUSED = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.1}
SIZE = 12  # rows of the table that does not grow; fewer than there are ids


class Batch:
    """Of another size on every rank and step, sometimes empty."""

    def __init__(self, rank, number):
        generator = torch.Generator().manual_seed(100 * number + rank)
        samples = (number + 2 * rank) % 5
        self.dense = torch.randn(samples, 2, generator=generator)
        lengths = torch.randint(0, 4, (2 * samples,), generator=generator)
        values = torch.randint(0, 60, (int(lengths.sum()),), generator=generator) * 7919 - 2**62
        self.features = KeyedJaggedTensor(["f", "g"], values, lengths=lengths, stride=samples)


class Model(nn.Module):
    """A table whose ids change hands and one that grows."""

    def __init__(self):
        super().__init__()
        slots = MCHManagedCollisionModule(SIZE, torch.device("cpu"), LRU_EvictionPolicy(), 2)
        self.slots = self._tables(SIZE, slots, ["f", "g"], True)
        growing = GrowingManagedCollisionModule(admission="freq:2", eviction="ttl:3")
        self.grown = self._tables(None, growing, ["g"], False)
        self.layer = nn.Linear(2 + 3 * 4, 1)

    @staticmethod
    def _tables(rows, ids, features, remaps):
        configs = [EmbeddingBagConfig(rows, 4, "t", feature_names=features)]
        mapped = ManagedCollisionCollection({"t": ids}, configs)
        return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), mapped, remaps)

    def forward(self, batch):
        slots, rows = self.slots(batch.features)
        grown, _ = self.grown(batch.features)
        output = self.layer(torch.cat([batch.dense, slots["f"], slots["g"], grown["g"]], 1)).squeeze(1)
        return (output - 1) ** 2, (output, rows.values())


def sharded_model():
    torch.manual_seed(3)
    model = Model()
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(FUSED))
    world = dist.get_world_size()
    wishes = {"slots": row_wise(), "grown": table_wise(world - 1) if world == 3 else row_wise()}
    plan = {
        path: construct_module_sharding_plan(
            getattr(model, path), {"t": wish}, sharder, world, device_type="cpu"
        )
        for path, wish in wishes.items()
    }
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env, plan=ShardingPlan(plan), sharders=[sharder])


def source(rank, count):
    return (Batch(rank, number) for number in range(count))


def train_plainly(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        losses, output = model(batch)
        losses.sum().backward()
        optimizer.step()
        yield output


def drain(pipeline, batches):
    while True:
        try:
            yield pipeline.progress(batches)
        except StopIteration:
            return


def trained(rank, count, kind):
    """Return outputs and mapped ids of every step, and what is left at the end."""
    model = sharded_model()
    optimizer = torch.optim.SGD(dense_parameters(model), 0.01)
    if kind is None:
        steps = train_plainly(model, optimizer, source(rank, count))
    else:
        steps = drain(kind(model, optimizer, torch.device("cpu")), source(rank, count))
    found = [tensor.detach() for output in steps for tensor in output]
    assert len(found) == 2 * count
    inner = model.module
    found.append(inner.slots.gather_tables()["t"])
    state = inner.grown.state_dict()
    found += [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    found += [parameter.detach() for parameter in dense_parameters(model)]
    (growth,) = inner.grown.growth()
    return found, (growth.ids, growth.admitted, growth.evicted, growth.hits)


def check_same_bits(rank):
    for count in (1, 2, 9):
        wanted, growth = trained(rank, count, None)
        for kind in PIPELINES:
            found, counted = trained(rank, count, kind)
            assert len(found) == len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (kind, count)
            assert counted == growth
    return growth


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_bits_of_the_plain_loop(world):
    for ids, admitted, evicted, _ in run_ranks(world, check_same_bits):
        assert admitted - evicted == ids > 0 and evicted > 0
