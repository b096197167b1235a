"""Features and rows between ranks through Python, between processes; worlds 1 to 4 are C++'s."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.distributed.dist_data import (
    EmbeddingsAllToOne,
    EmbeddingsAllToOneReduce,
    KJTAllToAll,
    KJTOneToAll,
    PooledEmbeddingsAllGather,
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsReduceScatter,
    SeqEmbeddingsAllToOne,
    SequenceEmbeddingsAllToAll,
    SplitsAllToAllAwaitable,
    VariableBatchPooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

BACKENDS = ["shm", "gloo"]


def exchange_features(rank):
    group = dist.group.WORLD
    kjt = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b", "c"],
        torch.arange(6 * (rank + 1)) + 100 * rank,
        torch.full((3 * (rank + 1),), 2),
        weights=torch.rand(6 * (rank + 1)),
    )
    awaitable = KJTAllToAll(group, [2, 1])(kjt).wait()
    features = awaitable.wait()
    assert features.keys() == (["a", "b"] if rank == 0 else ["c"])
    assert features.stride() == 3
    if rank == 1:
        assert features.values().tolist() == [4, 5, 108, 109, 110, 111]
    received = awaitable.received
    rows = torch.stack([features.values().float(), -features.values().float()], 1).requires_grad_()
    back = SequenceEmbeddingsAllToAll(group, [2, 1])(
        rows,
        features.lengths(),
        received.input_splits,
        received.output_splits,
        batch_size_per_rank=received.stride_per_rank,
        unbucketize_permute_tensor=torch.arange(kjt.values().numel() - 1, -1, -1),
    ).wait()
    assert back[:, 0].flip(0).tolist() == kjt.values().tolist()
    back.sum().backward()
    torch.testing.assert_close(rows.grad, torch.full_like(rows, 0.5))

    splits = SplitsAllToAllAwaitable([torch.tensor([rank, 10 + rank])], group).wait()
    assert splits == [[10 * rank, 10 * rank + 1]]
    x = torch.ones(4, rank + 1)
    pooled = PooledEmbeddingsAllToAll(group, [1, 2], callbacks=[lambda t: t * 2])
    assert pooled(x).wait().tolist() == [[2.0] * 3] * 2
    assert pooled(x, [1, 3]).wait().shape == (1 + 2 * rank, 3)
    assert PooledEmbeddingsReduceScatter(group)(torch.ones(4, 1)).wait().tolist() == [[2.0]] * 2
    assert PooledEmbeddingsReduceScatter(group)(torch.ones(4, 1), [3, 1]).wait().shape[0] == (3, 1)[rank]
    assert PooledEmbeddingsAllGather(group)(torch.ones(1, 2)).wait().shape == (2, 2)
    by_feature = VariableBatchPooledEmbeddingsReduceScatter(group)
    assert by_feature(torch.ones(6), [[1], [2]], [2]).wait().numel() == 2 * (rank + 1)
    variable = VariableBatchPooledEmbeddingsAllToAll(group, [[2], [3, 3]])
    sent = [
        (torch.rand(6), [[2], [1]], [2, 1, 3]),
        (torch.rand(24), [[1, 3], [2, 2]], [1, 2, 2]),
    ][rank]
    assert variable(*sent).wait().numel() == (16, 14)[rank]
    with pytest.raises(ValueError, match="splits of 1 ranks; the group has 2"):
        KJTAllToAll(group, [3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_travel(backend):
    run_ranks(2, exchange_features, backend=backend)


def test_parts_meet_on_one_device():
    parts = [torch.ones(2, 1), torch.ones(2, 2)]
    merged = EmbeddingsAllToOne(torch.device("cpu"), 2, 1)
    assert merged(parts).shape == (2, 3)
    merged.set_device("meta")
    assert merged(parts).is_meta
    assert EmbeddingsAllToOneReduce(torch.device("cpu"), 2)([parts[0], parts[0]]).sum() == 4
    assert len(SeqEmbeddingsAllToOne(torch.device("cpu"), 2)(parts)) == 2
    with pytest.raises(ValueError, match="there are 1 parts, not 2"):
        merged(parts[:1])
    kjt = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.arange(2), torch.ones(2, dtype=torch.int64))
    assert [part.keys() for part in KJTOneToAll([1, 1], 2)(kjt)] == [["a"], ["b"]]
    with pytest.raises(ValueError, match="1 parts for 2 devices"):
        KJTOneToAll([2], 2)
