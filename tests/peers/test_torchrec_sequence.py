"""Sharded rows of single ids beside torchrec 1.8.0's: two processes over Gloo, same rows, same input."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# The peer wants one number of columns, and cuts columns in multiples of four.
TABLES = [
    {"num_embeddings": 11, "embedding_dim": 8, "name": "a", "feature_names": ["f", "g"]},
    {"num_embeddings": 7, "embedding_dim": 8, "name": "b", "feature_names": ["f"]},
    {"num_embeddings": 9, "embedding_dim": 8, "name": "c", "feature_names": ["h"]},
]
RATE = 0.25


def fields(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (3 * 4,), generator=generator)
    values = torch.randint(0, 7, (int(lengths.sum()),), generator=generator)
    return {"keys": ["h", "f", "g"], "values": values, "lengths": lengths}


def wishes(plans, kind):
    """Return wishes for the fused kernel: with the dense one the peer's sequences are wrong on the CPU."""
    fused = {"compute_kernel": "fused"}
    if kind == "table_wise":
        return {name: plans.table_wise(rank=place % 2, **fused) for place, name in enumerate("abc")}
    if kind == "column_wise":
        return {name: plans.column_wise(ranks=[1, 0], **fused) for name in "abc"}
    return {name: plans.row_wise(**fused) for name in "abc"}


def make(library, kind, weights, **options):
    """Return the sharded collection of `tessera` or `torchrec`, and its KeyedJaggedTensor."""
    from importlib import import_module

    plans = import_module(f"{library}.distributed.sharding_plan")
    sharded = import_module(f"{library}.distributed.embedding")
    types = import_module(f"{library}.distributed.types")
    configs = import_module(f"{library}.modules.embedding_configs")
    modules = import_module(f"{library}.modules.embedding_modules")
    collection = modules.EmbeddingCollection(
        tables=[configs.EmbeddingConfig(**table) for table in TABLES], need_indices=True
    )
    collection.load_state_dict(weights)
    sharder = sharded.EmbeddingCollectionSharder(fused_params={"learning_rate": RATE}, **options)
    plan = plans.construct_module_sharding_plan(
        collection,
        per_param_sharding=wishes(plans, kind),
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    env = types.ShardingEnv.from_process_group(dist.group.WORLD)
    module = sharder.shard(collection, plan, env, torch.device("cpu"))
    return module, import_module(f"{library}.sparse.jagged_tensor").KeyedJaggedTensor


def compare(rank, kind):
    torch.manual_seed(0)
    weights = {
        f"embeddings.{table['name']}.weight": torch.rand(table["num_embeddings"], table["embedding_dim"])
        for table in TABLES
    }
    ours, our_features = make("tessera", kind, weights)
    once, _ = make("tessera", kind, weights, use_index_dedup=True)
    theirs, their_features = make("torchrec", kind, weights)
    for step in range(2):
        features = our_features.from_lengths_sync(**fields(rank, step))
        results = [ours(features).wait(), once(features).wait()]
        results.append(theirs(their_features.from_lengths_sync(**fields(rank, step))).wait())
        for rows in results:
            assert sorted(rows) == ["f@a", "f@b", "g", "h"]
        expected = results[2]
        for rows in results[:2]:
            for name in expected:
                torch.testing.assert_close(rows[name].values(), expected[name].values(), **CLOSE)
                assert torch.equal(rows[name].lengths(), expected[name].lengths())
                assert torch.equal(rows[name].weights(), expected[name].weights())
        for rows in results:
            sum(
                rows[name].values().square().sum() * (k + 1) for k, name in enumerate(sorted(rows))
            ).backward()
    states = [module.state_dict() for module in (ours, once, theirs)]
    assert set(states[0]) == set(states[2]) == set(weights)
    for name, whole in weights.items():
        parts = [
            {tuple(s.metadata.shard_offsets): s.tensor for s in state[name].local_shards()}
            for state in states
        ]
        assert parts[0].keys() == parts[1].keys() == parts[2].keys()
        for offsets, rows in parts[2].items():
            torch.testing.assert_close(parts[0][offsets], rows, **CLOSE)
            torch.testing.assert_close(parts[1][offsets], rows, **CLOSE)
            row, column = offsets
            start = whole[row : row + rows.size(0), column : column + rows.size(1)]
            assert not torch.equal(rows, start)


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
def test_values_and_steps_agree(kind):
    run_ranks(2, compare, kind, backend="gloo")
