"""Tables over two ranks beside torchrec 1.8.0's, over Gloo: plans, outputs, and rows after steps."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

TABLES = {"a": (10, 8, ["f", "g"]), "b": (7, 4, ["h"]), "c": (5, 4, ["f"])}


def ours():
    import tessera.distributed.embeddingbag as bags
    import tessera.distributed.sharding_plan as plans
    import tessera.distributed.types as types
    import tessera.modules.embedding_configs as configs
    import tessera.modules.embedding_modules as modules
    import tessera.sparse.jagged_tensor as jagged

    return bags, plans, types, configs, modules, jagged


def theirs():
    import torchrec.distributed.embeddingbag as bags
    import torchrec.distributed.sharding_plan as plans
    import torchrec.distributed.types as types
    import torchrec.modules.embedding_configs as configs
    import torchrec.modules.embedding_modules as modules
    import torchrec.sparse.jagged_tensor as jagged

    return bags, plans, types, configs, modules, jagged


def wishes_of(plans, kind):
    return {
        "table_wise": {"a": plans.table_wise(1), "b": plans.table_wise(0), "c": plans.table_wise(1)},
        "column_wise": {
            "a": plans.column_wise([1, 0]),
            "b": plans.column_wise([0]),
            "c": plans.column_wise([1]),
        },
        # The peer has no wish for it; the plan below calls column-wise parts so.
        "table_column_wise": {
            "a": plans.column_wise([1, 0]),
            "b": plans.column_wise([1]),
            "c": plans.column_wise([0]),
        },
        "row_wise": {name: plans.row_wise() for name in TABLES},
        "table_row_wise": {name: plans.table_row_wise(0) for name in TABLES},
        "data_parallel": {name: plans.data_parallel() for name in TABLES},
        "mixed": {"a": plans.row_wise(), "b": plans.table_wise(1), "c": plans.column_wise([0])},
    }[kind]


def make(side, kind, fused_params, means=()):
    bags, plans, types, configs, modules, _ = side
    tables = []
    for name, (rows, columns, features) in TABLES.items():
        pooling = configs.PoolingType.MEAN if name in means else configs.PoolingType.SUM
        tables.append(
            configs.EmbeddingBagConfig(
                num_embeddings=rows, embedding_dim=columns, name=name, feature_names=features, pooling=pooling
            )
        )
    ebc = modules.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    sharder = bags.EmbeddingBagCollectionSharder(fused_params=fused_params)
    plan = plans.construct_module_sharding_plan(
        ebc, wishes_of(plans, kind), sharder, local_size=2, world_size=2, device_type="cpu"
    )
    for sharding in plan.values():
        if sharding.sharding_type != "data_parallel":
            sharding.compute_kernel = "fused"
        if kind == "table_column_wise":
            sharding.sharding_type = kind
    env = types.ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = sharder.shard(ebc, plan, env, torch.device("cpu"))
    fill(sharded)
    return sharded, plan


def fill(sharded):
    """Give both sides the same rows, through the tensors of their state."""
    generator = torch.Generator().manual_seed(5)
    state = sharded.state_dict()
    for name, (rows, columns, _) in TABLES.items():
        whole = torch.randn(rows, columns, generator=generator)
        value = state[f"embedding_bags.{name}.weight"]
        if not hasattr(value, "local_shards"):
            value.copy_(whole)
            continue
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            height, width = shard.metadata.shard_sizes
            shard.tensor.copy_(whole[row : row + height, column : column + width])


def batch(side, rank):
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 4, (12,), generator=generator)
    values = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    return side[-1].KeyedJaggedTensor.from_lengths_sync(["f", "g", "h"], values, lengths)


def boxes(plan):
    return {
        name: None
        if sharding.sharding_spec is None
        else [(*s.shard_offsets, *s.shard_sizes, s.placement.rank()) for s in sharding.sharding_spec.shards]
        for name, sharding in plan.items()
    }


NAMES = ["f@a", "g", "h", "f@c"]


def optimizer_of(name, rate):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return {"optimizer": getattr(EmbOptimType, name), "learning_rate": rate, "eps": 1e-4}


def compare(rank, kind, optimizer):
    params = optimizer_of(optimizer, 0.1)
    results = []
    for side in (ours(), theirs()):
        sharded, plan = make(side, kind, params)
        outputs = []
        for step in range(2):
            pooled = sharded(batch(side, rank + 2 * step))
            pooled = pooled.wait() if hasattr(pooled, "wait") else pooled
            outputs.append([pooled[name].detach().clone() for name in NAMES])
            sum((pooled[name] * (k + 1)).square().sum() for k, name in enumerate(NAMES)).backward()
        state = sharded.state_dict()
        rows = {}
        for name in TABLES:
            value = state[f"embedding_bags.{name}.weight"]
            rows[name] = [s.tensor for s in value.local_shards()] if kind != "data_parallel" else [value]
        results.append((plan, outputs, rows))
    (our_plan, our_outputs, our_rows), (their_plan, their_outputs, their_rows) = results
    assert boxes(our_plan) == boxes(their_plan)
    # Dense tables leave their gradients; nobody has stepped them here, so that outputs stay the same.
    for a, b in zip(our_outputs, their_outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for name in TABLES:
        mine = [part for part in our_rows[name] if part.numel()]
        other = [part for part in their_rows[name] if part.numel()]
        assert len(mine) == len(other)
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


KINDS = [
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "data_parallel",
    "mixed",
]
RULES = ["EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"]


def compare_rules(rank, kind):
    for rule in RULES:
        compare(rank, kind, rule)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_steps(kind):
    env = {"LOCAL_WORLD_SIZE": "2"}
    run_ranks(2, compare_rules, kind, backend="gloo", env=env)


def mean_beside_others(rank):
    """A row-wise mean makes torchrec divide the other tables' outputs too; ours are the true ones."""
    found = []
    for side in (ours(), theirs()):
        sharded, _ = make(side, "mixed", optimizer_of("EXACT_SGD", 0.1), means=("a",))
        pooled = sharded(side[-1].KeyedJaggedTensor.from_lengths_sync(
            ["f", "g", "h"], torch.tensor([1, 2, 3, 4, 0, 2]), torch.tensor([2, 2, 2])
        ))  # fmt: skip
        pooled = pooled.wait() if hasattr(pooled, "wait") else pooled
        found.append({name: pooled[name].detach() for name in NAMES})
    mine, other = found
    whole = make(ours(), "mixed", optimizer_of("EXACT_SGD", 0.1), means=("a",))[0].gather_tables()
    truth = {
        "f@a": whole["a"][[1, 2]].mean(0),
        "g": whole["a"][[3, 4]].mean(0),
        "h": whole["b"][[0, 2]].sum(0),
        "f@c": whole["c"][[1, 2]].sum(0),
    }
    for name, row in truth.items():
        torch.testing.assert_close(mine[name][0], row)
    torch.testing.assert_close(other["g"][0], truth["g"])
    torch.testing.assert_close(other["h"][0], truth["h"] / 2, rtol=1e-4, atol=1e-5)  # torchrec's fault


def test_a_mean_leaves_other_tables_alone():
    run_ranks(2, mean_beside_others, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"})
