"""Position weights before sharded tables beside torchrec 1.8.0's: two processes over Gloo."""

from __future__ import annotations

import importlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

TABLES = {"a": (10, 8, ["f", "g"]), "b": (7, 4, ["h"])}
LENGTHS = {"f": 4, "g": 5, "h": 4}
NAMES = ["f", "g", "h"]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def names_of(side):
    modules = {
        "bags": "distributed.embeddingbag",
        "fp": "distributed.fp_embeddingbag",
        "plans": "distributed.sharding_plan",
        "types": "distributed.types",
        "configs": "modules.embedding_configs",
        "modules": "modules.embedding_modules",
        "processors": "modules.feature_processor_",
        "fp_modules": "modules.fp_embedding_modules",
        "jagged": "sparse.jagged_tensor",
    }
    return {name: importlib.import_module(f"{side}.{path}") for name, path in modules.items()}


def wishes_of(plans, kind):
    return {
        "table_wise": {"a": plans.table_wise(1), "b": plans.table_wise(0)},
        "column_wise": {"a": plans.column_wise([1, 0]), "b": plans.column_wise([0])},
        "row_wise": {"a": plans.row_wise(), "b": plans.row_wise()},
        "mixed": {"a": plans.row_wise(), "b": plans.table_wise(1)},
    }[kind]


def make(side, kind, is_collection):
    """Return the sharded module of one side; rows and position weights are the same on both."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    generator = torch.Generator().manual_seed(5)
    tables = [
        side["configs"].EmbeddingBagConfig(
            num_embeddings=rows, embedding_dim=columns, name=name, feature_names=features
        )
        for name, (rows, columns, features) in TABLES.items()
    ]
    device = torch.device("cpu")
    bags = side["modules"].EmbeddingBagCollection(tables=tables, device=device, is_weighted=True)
    if is_collection:
        processors = side["processors"].PositionWeightedModuleCollection(LENGTHS, device=device)
    else:
        processors = {
            name: side["processors"].PositionWeightedModule(length, device=device)
            for name, length in LENGTHS.items()
        }
    module = side["fp_modules"].FeatureProcessedEmbeddingBagCollection(bags, processors)
    with torch.no_grad():
        for _, weight in sorted(module.named_parameters()):
            weight.copy_(torch.randn(weight.shape, generator=generator))
    sharder = side["fp"].FeatureProcessedEmbeddingBagCollectionSharder(
        side["bags"].EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
        )
    )
    plan = side["plans"].construct_module_sharding_plan(
        module, wishes_of(side["plans"], kind), sharder, local_size=2, world_size=2, device_type="cpu"
    )
    for sharding in plan.values():
        sharding.compute_kernel = "fused"
    whole = {name: table.weight.detach().clone() for name, table in bags.embedding_bags.items()}
    env = side["types"].ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = sharder.shard(module, plan, env, device)
    for name in TABLES:
        value = sharded.state_dict()[f"_embedding_bag_collection.embedding_bags.{name}.weight"]
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            height, width = shard.metadata.shard_sizes
            shard.tensor.copy_(whole[name][row : row + height, column : column + width])
    return sharded


def batch(side, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (12,), generator=generator)
    values = torch.randint(0, 7, (int(lengths.sum()),), generator=generator)
    return side["jagged"].KeyedJaggedTensor.from_lengths_sync(NAMES, values, lengths)


def run(rank, name, kind, is_collection):
    side = names_of(name)
    sharded = make(side, kind, is_collection)
    outputs = []
    for step in range(2):
        pooled = sharded(batch(side, rank + 2 * step))
        pooled = pooled.wait() if hasattr(pooled, "wait") else pooled
        outputs.append([pooled[feature].detach().clone() for feature in NAMES])
        sum((pooled[feature] * (k + 1)).square().sum() for k, feature in enumerate(NAMES)).backward()
        with torch.no_grad():
            for parameter in sharded._feature_processors.parameters():
                dist.all_reduce(parameter.grad)  # data parallelism averages
                parameter -= 0.01 * parameter.grad / 2
                parameter.grad = None
    state = sharded.state_dict()
    tables = {
        key: [s.tensor for s in v.local_shards()] for key, v in state.items() if "embedding_bags" in key
    }
    return outputs, tables, {key: v.clone() for key, v in state.items() if "_feature_processors" in key}


KINDS = ["table_wise", "column_wise", "row_wise", "mixed"]


def compare(rank, is_collection):
    for kind in KINDS:
        outputs, tables, weights = run(rank, "tessera", kind, is_collection)
        their_outputs, their_tables, their_weights = run(rank, "torchrec", kind, is_collection)
        torch.testing.assert_close(outputs, their_outputs, **CLOSE, msg=lambda t, k=kind: f"{k}: {t}")
        assert set(weights) == set(their_weights)
        assert set(tables) == set(their_tables)
        torch.testing.assert_close(weights, their_weights, **CLOSE, msg=lambda t, k=kind: f"{k}: {t}")
        for name, parts in tables.items():
            for mine, other in zip(parts, their_tables[name], strict=True):
                torch.testing.assert_close(mine, other, **CLOSE, msg=lambda t, k=kind: f"{k}: {t}")


@pytest.mark.parametrize("is_collection", [False, True])
def test_the_same_steps(is_collection):
    run_ranks(2, compare, is_collection, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"})
