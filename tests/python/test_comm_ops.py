"""tessera.distributed.comm_ops, ranks as processes, under torch's Gloo groups and shm."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.distributed import comm_ops
from tessera.distributed.comm import get_group_rank, get_local_rank, get_local_size, get_num_groups
from tessera.distributed.dist_data import JaggedTensorAllToAll
from tessera.distributed.types import QuantizedCommCodec, QuantizedCommCodecs
from tessera.sparse.jagged_tensor import JaggedTensor


def exchange(rank):
    size = dist.get_world_size()
    batches = [1 + r % 2 for r in range(size)]
    dims = [2 + r for r in range(size)]
    # The value says whose table and whose sample it is.
    samples = torch.repeat_interleave(torch.arange(size), torch.tensor(batches))
    pooled = (10.0 * rank + samples[:, None]).expand(-1, dims[rank]).clone().requires_grad_(True)
    output = comm_ops.alltoall_pooled(pooled, batches, dims).wait()
    tables = torch.repeat_interleave(torch.arange(size), torch.tensor(dims))
    assert torch.equal(output, (10.0 * tables + rank).expand(batches[rank], -1))
    output.sum().backward()
    assert torch.equal(pooled.grad, torch.full_like(pooled, 1 / size))

    codec = QuantizedCommCodec("fp16")
    packed = comm_ops.alltoall_pooled(
        pooled.detach(), batches, dims, codecs=QuantizedCommCodecs(codec, codec)
    )
    assert torch.equal(packed.wait(), output)  # small whole numbers survive 16 bits

    rows = torch.ones(size * 2, 3, requires_grad=True)
    assert torch.equal(comm_ops.reduce_scatter_base_pooled(rows).wait(), torch.full((2, 3), float(size)))
    assert comm_ops.reduce_scatter_v_pooled(rows, [0] * (size - 1) + [2 * size]).wait().shape == (
        (2 * size if rank == size - 1 else 0),
        3,
    )
    assert torch.equal(
        comm_ops.reduce_scatter_pooled([torch.full((1,), float(r)) for r in range(size)]).wait(),
        torch.full((1,), float(rank * size)),
    )
    assert comm_ops.all_gather_base_pooled(torch.full((1, 2), float(rank))).wait()[:, 0].tolist() == list(
        range(size)
    )
    parts = comm_ops.alltoallv([torch.full((size, 1), float(rank))] * 2, per_rank_split_lengths=[2] * size)
    assert [part.tolist() for part in parts.wait()] == [[[float(r)] * 2] for r in range(size)]
    flat = comm_ops.reduce_scatter_v_per_feature_pooled(torch.ones(3 * size), [[1, 1]] * size, [2, 1])
    assert flat.wait().tolist() == [float(size)] * 3


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_exchanges(backend):
    for size in (1, 2, 3):
        run_ranks(size, exchange, backend=backend)


def reference_numbers(rank):
    # Two ranks; rank 0 holds one feature of 2 values, rank 1 two features of 3 values.
    dims = [[2], [3, 3]]
    own = [[2, 1, 2], [1, 3, 1]][rank]  # this rank's batch of the three features
    batches = [[[2], [1]], [[1, 2], [3, 1]]][rank]  # [rank][this rank's feature]
    count = sum(b * d for row in batches for b, d in zip(row, dims[rank], strict=True))
    output = comm_ops.variable_batch_alltoall_pooled(
        torch.arange(float(count)) + 100 * rank, batches, own, dims
    ).wait()
    return output.tolist()


def test_variable_batch():
    first, second = run_ranks(2, reference_numbers)
    # Rank 0 gets its 2 samples of feature 0 and, from rank 1, 1 + 2 samples of 3 values.
    assert first == [0, 1, 2, 3] + [100 + i for i in range(9)]
    assert second == [4, 5] + [109 + i for i in range(12)]


def test_gradient_division_is_a_switch():
    assert comm_ops.get_gradient_division()
    comm_ops.set_gradient_division(False)
    assert not comm_ops.get_gradient_division()
    comm_ops.set_gradient_division(True)


def test_codecs_say_what_they_know():
    with pytest.raises(ValueError, match="'fp12' is not one of fp32, fp16, bf16, int8, fp8"):
        QuantizedCommCodec("fp12")
    codec = QuantizedCommCodec("int8")
    values = torch.linspace(-1, 1, 40)
    wire = codec.encode(values)
    assert wire.dtype == torch.uint8 and wire.numel() == codec.calc_quantized_size(40) == 80
    assert torch.allclose(codec.decode(wire, 40), values, atol=2 / 255)
    with pytest.raises(ValueError, match="give out_split or per_rank_split_lengths"):
        comm_ops.alltoallv([torch.ones(1, 1)])


def taken_apart(rank):
    """Every pair of classes gives what its function gives, gradients included."""
    group, size, device = dist.group.WORLD, dist.get_world_size(), torch.device("cpu")

    def run(req, wait, info, *inputs):
        request = comm_ops.Request(group, device)
        token = req.apply(group, request, info, *inputs)
        assert token.requires_grad
        return wait.apply(group, request, token)

    def same(got, expected, inputs, again):
        got, expected = ([x] if torch.is_tensor(x) else list(x) for x in (got, expected))
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
        sum((i + 1) * x.square().sum() for i, x in enumerate(got)).backward()
        sum((i + 1) * x.square().sum() for i, x in enumerate(expected)).backward()
        for x, y in zip(inputs, again, strict=True):
            assert torch.equal(x.grad, y.grad)

    def twice(*shape):
        values = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 10 * rank
        return values.clone().requires_grad_(True), values.clone().requires_grad_(True)

    batches, dims = [1 + r for r in range(size)], [2 + r for r in range(size)]
    x, y = twice(sum(batches), dims[rank])
    info = comm_ops.All2AllPooledInfo(batches, dims, None, None)
    got = run(comm_ops.All2All_Pooled_Req, comm_ops.All2All_Pooled_Wait, info, x)
    same(got, comm_ops.alltoall_pooled(y, batches, dims).wait(), [x], [y])

    per_feature = [[b] for b in batches]
    args = (per_feature, [batches[rank]] * size, [[d] for d in dims])
    x, y = twice(sum(batches) * dims[rank])
    info = comm_ops.VariableBatchAll2AllPooledInfo(*args)
    got = run(
        comm_ops.Variable_Batch_All2All_Pooled_Req, comm_ops.Variable_Batch_All2All_Pooled_Wait, info, x
    )
    same(got, comm_ops.variable_batch_alltoall_pooled(y, *args).wait(), [x], [y])

    recat, lengths, splits = torch.arange(size), torch.ones(size, dtype=torch.long), [1] * size
    x, y = twice(size, 2)
    info = comm_ops.All2AllSequenceInfo(2, lengths, recat, recat, splits, splits)
    got = run(comm_ops.All2All_Seq_Req, comm_ops.All2All_Seq_Req_Wait, info, x)
    same(got, comm_ops.alltoall_sequence(y, recat, recat, lengths, splits, splits).wait(), [x], [y])

    x, y = twice(size, 3)
    info = comm_ops.All2AllVInfo([3] * size, size, 1, [1] * size, [3])
    got = run(comm_ops.All2Allv_Req, comm_ops.All2Allv_Wait, info, x)
    same(got, comm_ops.alltoallv([y], [3] * size).wait(), [x], [y])

    xs, ys = zip(*(twice(1 + r, 2) for r in range(size)), strict=True)
    info = comm_ops.ReduceScatterInfo([x.size() for x in xs])
    got = run(comm_ops.ReduceScatter_Req, comm_ops.ReduceScatter_Wait, info, *xs)
    same(got, comm_ops.reduce_scatter_pooled(list(ys)).wait(), xs, ys)

    x, y = twice(2 * size, 2)
    info = comm_ops.ReduceScatterBaseInfo(x.size())
    got = run(comm_ops.ReduceScatterBase_Req, comm_ops.ReduceScatterBase_Wait, info, x)
    same(got, comm_ops.reduce_scatter_base_pooled(y).wait(), [x], [y])

    x, y = twice(sum(batches), 2)
    info = comm_ops.ReduceScatterVInfo([x.size()], batches, False, list(x.size()), None)
    got = run(comm_ops.ReduceScatterV_Req, comm_ops.ReduceScatterV_Wait, info, x)
    same(got, comm_ops.reduce_scatter_v_pooled(y, batches).wait(), [x], [y])

    x, y = twice(2, 2)
    info = comm_ops.AllGatherBaseInfo(x.size())
    got = run(comm_ops.AllGatherBase_Req, comm_ops.AllGatherBase_Wait, info, x)
    same(got, comm_ops.all_gather_base_pooled(y).wait(), [x], [y])

    request = comm_ops.Request(group, device)
    with pytest.raises(RuntimeError, match="nothing was started"):
        request.wait()
    request = comm_ops.Request(group, device)
    comm_ops.AllGatherBase_Req.apply(group, request, info, x)
    with pytest.raises(RuntimeError, match="holds an exchange already"):
        comm_ops.AllGatherBase_Req.apply(group, request, info, x)
    with pytest.raises(
        RuntimeError, match="All2All_Pooled_Wait waits for an exchange that AllGatherBase_Wait"
    ):
        comm_ops.All2All_Pooled_Wait.apply(group, request)
    assert torch.equal(request.wait(), comm_ops.all_gather_base_pooled(x).wait())


def test_exchanges_taken_apart():
    for size in (1, 2, 3):
        run_ranks(size, taken_apart, backend="shm")


NODES = [name for name in comm_ops.__all__ if name.endswith(("_Req", "_Wait"))]


def test_the_nodes_are_functions_of_autograd():
    assert len(NODES) == 16
    for name in NODES:
        node = getattr(comm_ops, name)
        assert issubclass(node, torch.autograd.Function)
        for step in ("forward", "backward"):
            assert isinstance(inspect.getattr_static(node, step), staticmethod), (name, step)
        wanted = ["ctx", "pg", "myreq"]
        assert list(inspect.signature(node.forward).parameters)[:3] == wanted, name


def check_nodes_of_autograd(rank):
    group, size = dist.group.WORLD, dist.get_world_size()
    info = comm_ops.AllGatherBaseInfo(torch.Size([2]))

    def gathered(x):
        request = comm_ops.Request(group, torch.device("cpu"))
        comm_ops.AllGatherBase_Req.apply(group, request, info, x)
        return request.wait()

    # A rank whose input needs no gradient takes part in the backward pass.
    x = torch.full((2,), 1.0 + rank, requires_grad=rank == 0)
    (gathered(x) * (1 + rank)).sum().backward()
    assert x.grad is None if rank else x.grad.tolist() == [(1 + size) / 2] * 2
    # Without a record there is none.
    with torch.no_grad():
        assert not gathered(x).requires_grad
    # Waiting again gives what came first.
    y = torch.ones(2, requires_grad=True)
    request = comm_ops.Request(group, torch.device("cpu"))
    token = comm_ops.AllGatherBase_Req.apply(group, request, info, y)
    assert token.grad_fn.name() == "AllGatherBase_ReqBackward"
    rows = comm_ops.AllGatherBase_Wait.apply(group, request, token)
    assert rows.grad_fn.name() == "AllGatherBase_WaitBackward"
    assert request.wait() is rows
    with pytest.raises(ValueError, match="call backward without create_graph"):
        torch.autograd.grad(rows.sum(), y, create_graph=True)
    # The reference gives the inputs of alltoallv as a list.
    parts = [torch.full((size, 1), float(rank), requires_grad=True) for _ in range(2)]
    info = comm_ops.All2AllVInfo([2] * size, size, 1, [1] * size, [1, 1])
    request = comm_ops.Request(group, torch.device("cpu"))
    comm_ops.All2Allv_Req.apply(group, request, info, parts)
    sum((r + 1) * part.sum() for r, part in enumerate(request.wait())).backward()
    assert [part.grad.flatten().tolist() for part in parts] == [[1.0 + rank] * size] * 2


def test_nodes_of_autograd():
    for size in (1, 2, 3):
        run_ranks(size, check_nodes_of_autograd, backend="shm")


def check_jagged_all_to_all(rank):
    """Rank r sends bag i to rank i."""
    jt = JaggedTensor(
        torch.arange(6) + 10 * rank, weights=torch.arange(6.0), lengths=torch.tensor([1 + rank, 5 - rank])
    )
    one = torch.tensor([1, 1])
    got = JaggedTensorAllToAll(jt, one, one, dist.group.WORLD).wait()
    assert got.lengths().tolist() == ([1, 2] if rank == 0 else [5, 4])
    assert got.values().tolist() == ([0, 10, 11] if rank == 0 else [1, 2, 3, 4, 5, 12, 13, 14, 15])
    assert got.weights().numel() == got.values().numel()


def test_bags_to_ranks():
    run_ranks(2, check_jagged_all_to_all)


def test_codecs_are_copied_and_pickled():
    codec = QuantizedCommCodec("int8", loss_scale=2.0, row_dim=4)
    values = torch.linspace(-1, 1, 8)
    wire = codec.encode(values)
    for other in (copy.deepcopy(codec), pickle.loads(pickle.dumps(codec))):
        assert torch.equal(other.encode(values), wire)
        assert other.calc_quantized_size(8) == codec.calc_quantized_size(8)
    assert codec.padded_size(torch.ones(4, 5), [5], 0, codec.create_context()) == (5, 0)


def test_a_local_size_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (get_local_size(4), get_local_size(3)) == (2, 3)
    assert (get_local_rank(4, 3), get_group_rank(4, 3), get_num_groups(4)) == (1, 1, 2)
