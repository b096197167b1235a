"""Checkpoints of what communication hooks and table optimizers keep, from Python."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera import checkpoint


def ddp_job(kind):
    import tessera
    from tessera.nn.parallel import DistributedDataParallel

    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 2)))
    if kind == "error feedback":
        model._replica.register_comm_hook(tessera._C.int8_error_feedback_hook())
    else:
        model._register_fused_optim(torch.optim.Adam, lr=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if kind == "error feedback" else 0.0)
    state = {"model": model.state_dict(), "hook": checkpoint.HookState(model)}
    return model, optimizer, state


def train_ddp(model, optimizer, rank, first, steps):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(torch.arange(20.0).reshape(4, 5).add(7 * step + rank).sin()).square().mean().backward()
        optimizer.step()


def ddp_rank(rank, root, kind):
    model, optimizer, state = ddp_job(kind)
    train_ddp(model, optimizer, rank, 0, 3)
    checkpoint.save(root, 3, state, dist.group.WORLD)
    train_ddp(model, optimizer, rank, 3, 3)
    other, optimizer, state = ddp_job(kind)
    checkpoint.load(root, state, dist.group.WORLD)
    train_ddp(other, optimizer, rank, 3, 3)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["error feedback", "optimizer in backward"])
def test_hooks_continue_bit_for_bit(tmp_path, kind):
    assert run_ranks(2, ddp_rank, str(tmp_path), kind) == [True, True]


def load_hook_rank(rank, root):
    _, _, state = ddp_job("error feedback")
    checkpoint.load(root, state, dist.group.WORLD)
    return state["hook"].model._replica.comm_hook().state()[0]["error/0.weight"].tolist()


def save_hook_rank(rank, root):
    model, optimizer, state = ddp_job("error feedback")
    train_ddp(model, optimizer, rank, 0, 2)
    checkpoint.save(root, 1, state, dist.group.WORLD)
    return state["hook"].model._replica.comm_hook().state()[0]["error/0.weight"].tolist()


def test_error_feedback_at_another_world(tmp_path):
    before = torch.tensor(run_ranks(2, save_hook_rank, str(tmp_path)), dtype=torch.float64)
    after = torch.tensor(run_ranks(3, load_hook_rank, str(tmp_path)), dtype=torch.float64)
    assert before.abs().max() > 0
    torch.testing.assert_close(before.mean(0), after.mean(0))


def collection(seed):
    import tessera
    from tessera.modules.embedding_configs import EmbeddingBagConfig
    from tessera.modules.embedding_modules import EmbeddingBagCollection

    torch.manual_seed(seed)
    options = tessera._C.embedding.OptimizerOptions()
    options.kind = tessera._C.embedding.OptimizerKind.ROWWISE_ADAGRAD
    options.learning_rate = 0.1
    table = EmbeddingBagConfig(name="users", num_embeddings=20, embedding_dim=4, feature_names=["u"])
    return torch.nn.ModuleDict({"tables": EmbeddingBagCollection([table], optimizer=options)})


def train_tables(model, first, steps):
    from tessera.sparse.jagged_tensor import KeyedJaggedTensor

    for step in range(first, first + steps):
        features = KeyedJaggedTensor.from_lengths_sync(
            ["u"], torch.tensor([step % 7, 3, step + 1]), torch.tensor([2, 1])
        )
        model["tables"](features).values().square().sum().backward()


def table_state(model):
    return {"model": model.state_dict(), "fused": checkpoint.fused_state(model)}


def test_fused_tables_continue_bit_for_bit(tmp_path):
    model = collection(1)
    train_tables(model, 0, 3)
    optimizer = model["tables"].fused_optimizer()
    optimizer.set_learning_rate(0.3)
    checkpoint.save(tmp_path, 3, table_state(model))
    train_tables(model, 3, 3)
    other = collection(2)
    checkpoint.load(tmp_path, table_state(other))
    assert other["tables"].fused_optimizer().num_steps == 3
    assert other["tables"].fused_optimizer().options.learning_rate == 0.3
    train_tables(other, 3, 3)
    assert torch.equal(other.state_dict()["tables.embedding_bags.users.weight"],
                       model.state_dict()["tables.embedding_bags.users.weight"])  # fmt: skip
    state = other["tables"].fused_optimizer().state_dict()
    assert torch.equal(state["users.momentum1"], optimizer.state_dict()["users.momentum1"])


def table_shards(rank, size, fill):
    """Columns over ranks; row-wise state of each cut is its rank, or nothing yet."""
    width = 12 // size
    weight = torch.arange(60.0).reshape(5, 12)[:, rank * width : (rank + 1) * width].clone()
    state = {"momentum1": torch.full((5,), float(rank))}
    if not fill:
        weight.zero_()
        state["momentum1"].fill_(-1)
    return [checkpoint.TableShard("t", 5, 12, 0, rank * width, weight, state)]


def save_tables(rank, root):
    shards = table_shards(rank, dist.get_world_size(), True)
    checkpoint.save(root, 1, {"tables": checkpoint.Tables(shards)}, dist.group.WORLD)


def load_tables(rank, root):
    shards = table_shards(rank, dist.get_world_size(), False)
    checkpoint.load(root, {"tables": checkpoint.Tables(shards)}, dist.group.WORLD)
    expected = table_shards(rank, dist.get_world_size(), True)
    return torch.equal(shards[0].weight, expected[0].weight), shards[0].state["momentum1"].tolist()


def test_columns_over_other_ranks(tmp_path):
    run_ranks(2, save_tables, str(tmp_path))
    # Three parts of four columns: the middle one lies half in each of the two that were saved.
    assert run_ranks(3, load_tables, str(tmp_path)) == [(True, [x] * 5) for x in (0.0, 0.5, 1.0)]
