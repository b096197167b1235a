"""The exchanges of sharded tables beside torchrec 1.8.0's: two processes over Gloo, same input."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import torch
import torch.distributed as dist
from ranks import run_ranks


def fields(rank, stride, variable=False, weighted=True):
    generator = torch.Generator().manual_seed(rank)
    strides = [stride] * 3 if not variable else [1 + rank, 2, 3 - rank]
    lengths = torch.randint(0, 4, (sum(strides),), generator=generator)
    values = torch.randint(0, 100, (int(lengths.sum()),), generator=generator)
    given = {
        "keys": ["a", "b", "c"],
        "values": values,
        "lengths": lengths,
        "weights": torch.rand(values.numel(), generator=generator) if weighted else None,
    }
    if variable:
        given["stride_per_key_per_rank"] = [[s] for s in strides]
    return given


def same(a, b):
    return (a is None and b is None) or torch.equal(a, b)


def compare_features(rank):
    import tessera.distributed.dist_data as our_data
    import tessera.sparse.jagged_tensor as ours
    import torchrec.distributed.dist_data as their_data
    import torchrec.sparse.jagged_tensor as theirs

    group = dist.group.WORLD
    for given in (
        fields(rank, 4),
        fields(rank, 2 + rank, weighted=False),
        fields(rank, 0, variable=True),
    ):
        received = []
        for data, kind in ((our_data, ours), (their_data, theirs)):
            kjt = kind.KeyedJaggedTensor.from_lengths_sync(**given)
            received.append(data.KJTAllToAll(group, [2, 1])(kjt).wait().wait())
        a, b = received
        assert a.keys() == b.keys()
        assert same(a.lengths(), b.lengths())
        assert same(a.values(), b.values())
        assert same(a.weights_or_none(), b.weights_or_none())
        assert a.stride_per_key() == b.stride_per_key()
        assert a.stride_per_key_per_rank() == b.stride_per_key_per_rank()


def compare_rows(rank):
    import tessera.distributed.comm_ops as ours
    import torchrec.distributed.comm_ops as theirs

    batches, dims = [2, 3], [3, 1]
    calls = {
        "alltoall_pooled": ((5, dims[rank]), (batches, dims)),
        "reduce_scatter_base_pooled": ((4, 2), ()),
        "all_gather_base_pooled": ((3, 2), ()),
        "variable_batch_alltoall_pooled": (
            ((6,), (24,))[rank],
            (
                ([[2], [1]], [[1, 3], [2, 2]])[rank],
                ([2, 1, 3], [1, 2, 2])[rank],
                [[2], [3, 3]],
            ),
        ),
    }
    for name, (shape, arguments) in calls.items():
        results = []
        for module in (ours, theirs):
            x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).requires_grad_()
            y = getattr(module, name)(x, *arguments, group=dist.group.WORLD).wait()
            (y * y * (rank + 1)).sum().backward()
            results.append((y.detach(), x.grad))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, msg=name)


def test_features_agree():
    run_ranks(2, compare_features, backend="gloo")


def test_rows_and_gradients_agree():
    run_ranks(2, compare_rows, backend="gloo")
