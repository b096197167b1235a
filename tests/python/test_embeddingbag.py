"""Tables over ranks through Python: equal to one process; worlds and types are C++'s and the peers'."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from tessera.distributed.types import ShardingEnv
from tessera.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tessera.modules.embedding_modules import EmbeddingBagCollection
from tessera.sparse.jagged_tensor import KeyedJaggedTensor


def collection(device="cpu", **options):
    torch.manual_seed(7)
    tables = [
        EmbeddingBagConfig(10, 4, "a", feature_names=["f", "g"]),
        EmbeddingBagConfig(7, 6, "b", feature_names=["h"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(5, 4, "c", feature_names=["f"]),
        EmbeddingBagConfig(6, 2, "d", feature_names=["i"]),
    ]
    return EmbeddingBagCollection(tables, device=torch.device(device), **options)


def batch(rank, samples=3):
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 4, (4 * samples,), generator=generator)
    values = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(["h", "f", "i", "g"], values, lengths)


MIXED = {"a": row_wise(), "b": row_wise(), "c": column_wise([1, 0]), "d": table_wise(1)}


def shard(wishes, fused_params=None, ebc=None, **options):
    ebc = ebc or collection()
    sharder = EmbeddingBagCollectionSharder(fused_params, **options)
    plan = construct_module_sharding_plan(ebc, wishes, sharder, device_type="cpu")
    return sharder.shard(ebc, plan, ShardingEnv.from_process_group(dist.group.WORLD))


def check_pass(rank):
    world = dist.get_world_size()
    whole = collection()
    sharded = shard(MIXED, {"learning_rate": 0.5})
    pooled = sharded(batch(rank))
    names = ["f@a", "g", "h", "f@c", "i"]
    expected = whole(batch(rank))
    for name in names:
        torch.testing.assert_close(pooled[name], expected[name])
    sum((pooled[name] * (k + 1)).sum() for k, name in enumerate(names)).backward()
    for r in range(world):
        pooled = whole(batch(r))
        (sum((pooled[name] * (k + 1)).sum() for k, name in enumerate(names)) / world).backward()
    for name, rows in sharded.gather_tables().items():
        weight = whole.embedding_bags[name].weight
        torch.testing.assert_close(rows, (weight - 0.5 * weight.grad).detach())


def test_sharded_equals_whole():
    run_ranks(2, check_pass)
