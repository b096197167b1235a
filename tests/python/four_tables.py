"""Four small tables, batches for them, and what sharded tables of any kind have in common."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tessera.distributed.sharding_plan import construct_module_sharding_plan
from tessera.distributed.types import ShardingEnv
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

NAMES = ["f@a", "g", "h", "f@c", "i"]  # of what they give


def four_tables(config, **options_of_b):
    """Return the tables; two of them share the feature f."""
    return [
        config(10, 4, "a", feature_names=["f", "g"]),
        config(7, 6, "b", feature_names=["h"], **options_of_b),
        config(5, 4, "c", feature_names=["f"]),
        config(6, 2, "d", feature_names=["i"]),
    ]


def batch(rank, samples=3):
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 4, (4 * samples,), generator=generator)
    values = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(["h", "f", "i", "g"], values, lengths)


def shard_with(sharder, module, wishes):
    plan = construct_module_sharding_plan(module, wishes, sharder, device_type="cpu")
    return sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD))


def check_loads(state, whole, targets):
    """Each target is emptied, loads `state`, and has the rows of `whole`."""
    for target in targets:
        target.reset_parameters()
        result = target.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
        for name, rows in target.gather_tables().items():
            assert torch.equal(rows, whole[name]), name


def check_same_optimizer_state(one, other):
    state = one.fused_optimizer.state_dict()["state"]
    for name, entries in other.fused_optimizer.state_dict()["state"].items():
        assert sorted(entries) == sorted(state[name])
        for key, value in entries.items():
            own = state[name][key]
            if not hasattr(value, "local_shards"):
                assert torch.equal(value, own), key
                continue
            for a, b in zip(value.local_shards(), own.local_shards(), strict=True):
                assert a.metadata == b.metadata
                assert torch.equal(a.tensor, b.tensor), key
