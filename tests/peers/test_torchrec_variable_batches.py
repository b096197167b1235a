"""Rows of single ids of batches whose features have different sizes, beside torchrec 1.8.0, on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from two_sides import OURS, SIDES

from ranks import run_ranks  # isort: skip

ROWS = {"a": torch.arange(40.0).view(10, 4), "b": -torch.arange(28.0).view(7, 4)}


def collection(side, need_indices):
    config = side("modules.embedding_configs").EmbeddingConfig
    tables = [
        config(num_embeddings=len(rows), embedding_dim=4, name=name, feature_names=[f"f_{name}"])
        for name, rows in ROWS.items()
    ]
    return side("modules.embedding_modules").EmbeddingCollection(
        tables=tables, device=torch.device("cpu"), need_indices=need_indices
    )


def batch(side, rank):
    """Two bags of one feature and one of the other become three samples."""
    return side("sparse.jagged_tensor").KeyedJaggedTensor(
        keys=["f_b", "f_a"],
        values=torch.tensor([4, 5, 1, 2, 3]) + rank,
        lengths=torch.tensor([2, 2, 1]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["f_b", "f_a"], torch.tensor([[0, 0, 0], [0, 1, 0]])),
    )


def looked_up(rank, side, kind, need_indices):
    plans, types, sharded = (
        side("distributed.sharding_plan"),
        side("distributed.types"),
        side("distributed.embedding"),
    )
    wish = {"table_wise": plans.table_wise(1), "row_wise": plans.row_wise()}[kind]
    module = collection(side, need_indices)
    sharder = sharded.EmbeddingCollectionSharder(fused_params={"learning_rate": 0.5})
    plan = plans.construct_module_sharding_plan(module, dict.fromkeys(ROWS, wish), sharder, 2, 2, "cpu")
    for sharding in plan.values():
        sharding.compute_kernel = "fused"
    env = types.ShardingEnv.from_process_group(dist.group.WORLD)
    module = sharder.shard(module, plan, env, torch.device("cpu"))
    state = module.state_dict()
    for name, rows in ROWS.items():
        for shard in state[f"embeddings.{name}.weight"].local_shards():
            first = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(rows[first : first + shard.metadata.shard_sizes[0]])
    found = module(batch(side, rank))
    return module, found.wait() if hasattr(found, "wait") else found


def compare(rank, kind):
    for need_indices in (False, True):
        (module, ours), (_, theirs) = [looked_up(rank, side, kind, need_indices) for side in SIDES]
        for name in ("f_a", "f_b"):
            assert ours[name].lengths().tolist() == theirs[name].lengths().tolist()
            assert len(ours[name].lengths()) == 3
            torch.testing.assert_close(ours[name].values(), theirs[name].values())
            if need_indices:
                assert torch.equal(ours[name].weights(), theirs[name].weights())
    whole = collection(OURS, True)
    with torch.no_grad():
        for name, rows in ROWS.items():
            whole.embeddings[name].weight.copy_(rows)
    alone = whole(batch(OURS, rank))
    for name, rows in ours.items():
        torch.testing.assert_close(alone[name].values(), rows.values())
        assert torch.equal(alone[name].lengths(), rows.lengths())
    # The rows of a bag get the gradients of all samples that have it.
    sum(rows.values().square().sum() for rows in ours.values()).backward()
    for r in range(2):
        sum(rows.values().square().sum() / 2 for rows in whole(batch(OURS, r)).values()).backward()
    for name, rows in module.gather_tables().items():
        torch.testing.assert_close(rows, ROWS[name] - 0.5 * whole.embeddings[name].weight.grad)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_samples_get_their_bags(kind):
    run_ranks(2, compare, kind, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"})


def wrong(rank):
    module, _ = looked_up(rank, OURS, "row_wise", False)
    good = batch(OURS, rank)
    names, rows = good.inverse_indices()
    fields = {"lengths": good.lengths(), "stride_per_key_per_rank": good.stride_per_key_per_rank()}
    kjt = OURS("sparse.jagged_tensor").KeyedJaggedTensor
    bad = kjt(good.keys(), good.values(), **fields, inverse_indices=(names, rows + 2 * rank))
    with pytest.raises(IndexError, match=r"rank 1.*the inverse indices of feature 'f_a' go from 2 to 3"):
        module(bad).wait()


def test_bad_inverse_indices_are_an_error_on_all_ranks():
    run_ranks(2, wrong, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"})
