"""torch.distributed over the backend "shm": the same results as Gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
SHAPES = [(0,), (1,), (7,), (3, 5), (1031,), (257, 33)]


def values(shape, dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Small whole numbers: sums are exact in every type, in any order.
    numbers = torch.randint(0, 5, shape, generator=generator)
    return numbers.bool() if dtype == torch.bool else numbers.to(dtype)


def pair_of_groups():
    return dist.new_group(backend="shm"), dist.new_group(backend="gloo")


def same(ours, theirs, what):
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, what
        assert ours.shape == theirs.shape, what
        assert torch.equal(ours, theirs), f"{what}: {ours} is not {theirs}"
        return
    assert len(ours) == len(theirs), what
    for mine, other in zip(ours, theirs, strict=True):
        same(mine, other, what)


def broadcast(group, make, size, rank):
    tensor = make(rank)
    dist.broadcast(tensor, src=size - 1, group=group)
    return tensor


def all_reduce(group, make, size, rank):
    tensor = make(rank)
    dist.all_reduce(tensor, group=group)
    return tensor


def reduce(group, make, size, rank):
    tensor = make(rank)
    dist.reduce(tensor, dst=0, group=group)
    return tensor


def all_gather(group, make, size, rank):
    tensors = [torch.zeros_like(make(rank)) for _ in range(size)]
    dist.all_gather(tensors, make(rank), group=group)
    return tensors


def all_gather_into_tensor(group, make, size, rank):
    mine = make(rank)
    output = torch.zeros((size * mine.shape[0], *mine.shape[1:]), dtype=mine.dtype)
    dist.all_gather_into_tensor(output, mine, group=group)
    return output


def gather(group, make, size, rank):
    tensors = [torch.zeros_like(make(rank)) for _ in range(size)] if rank == 1 else None
    dist.gather(make(rank), tensors, dst=1, group=group)
    return tensors or []


def scatter(group, make, size, rank):
    output = torch.zeros_like(make(rank))
    dist.scatter(output, [make(r) for r in range(size)] if rank == 1 else None, src=1, group=group)
    return output


def reduce_scatter(group, make, size, rank):
    output = torch.zeros_like(make(rank))
    dist.reduce_scatter(output, [make(10 * rank + r) for r in range(size)], group=group)
    return output


def reduce_scatter_tensor(group, make, size, rank):
    whole = torch.cat([make(10 * rank + r) for r in range(size)])
    output = torch.zeros_like(make(rank))
    dist.reduce_scatter_tensor(output, whole, group=group)
    return output


def all_to_all_single(group, make, size, rank):
    whole = torch.cat([make(10 * rank + r) for r in range(size)])
    output = torch.zeros_like(whole)
    dist.all_to_all_single(output, whole, group=group)
    return output


def all_to_all(group, make, size, rank):
    # Gloo has no list form; the single form stands in for it.
    parts = [make(10 * rank + r) for r in range(size)]
    if dist.get_backend(group) == "gloo":
        rows = [len(part) for part in parts]
        return list(all_to_all_single(group, make, size, rank).split(rows))
    outputs = [torch.zeros_like(part) for part in parts]
    dist.all_to_all(outputs, parts, group=group)
    return outputs


OPERATIONS = [
    broadcast,
    all_reduce,
    reduce,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_tensor,
    all_to_all_single,
    all_to_all,
]
# Gloo does not know these types: it carries them as others.
CARRIERS = {torch.bool: torch.int32, torch.int16: torch.int32}


def cast(result, dtype):
    return result.to(dtype) if isinstance(result, torch.Tensor) else [r.to(dtype) for r in result]


def compare_with_gloo(rank):
    size = dist.get_world_size()
    shm, gloo = pair_of_groups()
    for operation in OPERATIONS:
        for dtype in [*FLOATS, *INTEGERS, torch.bool]:
            for shape in SHAPES if dtype == torch.float32 else SHAPES[3:4]:

                def make(seed, shape=shape, dtype=dtype):
                    return values(shape, dtype, seed)

                def make_carrier(seed, shape=shape, dtype=dtype):
                    return values(shape, dtype, seed).to(CARRIERS.get(dtype, dtype))

                ours = operation(shm, make, size, rank)
                theirs = cast(operation(gloo, make_carrier, size, rank), dtype)
                if rank > 0 and operation is reduce:
                    continue  # only the root's tensor means something
                same(ours, theirs, f"{operation.__name__} of {dtype} {shape}")


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_gives_what_gloo_gives(size):
    run_ranks(size, compare_with_gloo)


def reductions(rank):
    shm, gloo = pair_of_groups()
    size = dist.get_world_size()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.int64):
            ours, theirs = values((100,), dtype, rank), values((100,), dtype, rank)
            dist.all_reduce(ours, op, group=shm)
            dist.all_reduce(theirs, op, group=gloo)
            same(ours, theirs, f"{op} of {dtype}")
    bits = {
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    for op, function in bits.items():
        ours = values((100,), torch.int32, rank)
        dist.all_reduce(ours, op, group=shm)
        expected = values((100,), torch.int32, 0)
        for other in range(1, size):
            expected = function(expected, values((100,), torch.int32, other))
        same(ours, expected, str(op))
    average = torch.full((3,), float(rank))
    dist.all_reduce(average, dist.ReduceOp.AVG, group=shm)
    same(average, torch.full((3,), (size - 1) / 2), "average")
    either = torch.tensor([rank == 0, False, True])
    dist.all_reduce(either, group=shm)
    same(either, torch.tensor([True, False, True]), "sum of bool is or")


def test_reductions_give_what_gloo_gives():
    run_ranks(3, reductions)


def uneven(rank):
    shm, gloo = pair_of_groups()
    size = dist.get_world_size()
    # Rank r sends r + i rows to rank i: one of them sends none.
    sends = [rank + i if (rank, i) != (1, 1) else 0 for i in range(size)]
    receives = [i + rank if (i, rank) != (1, 1) else 0 for i in range(size)]
    whole = values((sum(sends), 4), torch.float32, rank)
    results = []
    for group in (shm, gloo):
        output = torch.zeros(sum(receives), 4)
        dist.all_to_all_single(output, whole, receives, sends, group=group)
        results.append(output)
    same(*results, "uneven all_to_all_single")
    parts = [torch.full((i + 1, rank + 1), float(10 * rank + i)) for i in range(size)]
    outputs = [torch.zeros(rank + 1, i + 1) for i in range(size)]
    dist.all_to_all(outputs, parts, group=shm)
    same(
        outputs,
        [torch.full((rank + 1, i + 1), float(10 * i + rank)) for i in range(size)],
        "uneven all_to_all",
    )


def test_all_to_all_takes_uneven_parts():
    run_ranks(3, uneven)


def non_contiguous(rank):
    shm, gloo = pair_of_groups()
    size = dist.get_world_size()
    for make in (
        lambda seed: values((6, 8), torch.float32, seed).t(),
        lambda seed: values((6, 8), torch.float32, seed)[:, ::2],
        lambda seed: values((4, 6, 8), torch.float32, seed)[1:3, :, 3:],
    ):
        ours, theirs = make(rank), make(rank)
        assert not ours.is_contiguous()
        dist.all_reduce(ours, group=shm)
        theirs = theirs.contiguous()
        dist.all_reduce(theirs, group=gloo)
        same(ours, theirs, "non-contiguous all_reduce")
        ours = make(rank)
        dist.broadcast(ours, src=1, group=shm)
        same(ours, make(1), "non-contiguous broadcast")
        outputs = [make(7) for _ in range(size)]
        dist.all_gather(outputs, make(rank), group=shm)
        same(outputs, [make(r) for r in range(size)], "non-contiguous all_gather")


def test_tensors_may_be_non_contiguous():
    run_ranks(2, non_contiguous)


def point_to_point(rank):
    size = dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    received = torch.zeros(5)
    if rank % 2 == 0:
        dist.send(torch.full((5,), float(rank)), right)
        dist.recv(received, left)
    else:
        dist.recv(received, left)
        dist.send(torch.full((5,), float(rank)), right)
    same(received, torch.full((5,), float(left)), "send and recv")
    received = torch.zeros(2, 3, dtype=torch.int64)
    works = [
        dist.isend(torch.full((2, 3), rank), right, tag=3),
        dist.irecv(received, left, tag=3),
    ]
    for work in works:
        work.wait()
    same(received, torch.full((2, 3), left), "isend and irecv")
    received = torch.zeros(100_000)
    operations = [
        dist.P2POp(dist.isend, torch.full((100_000,), float(rank)), right),
        dist.P2POp(dist.irecv, received, left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(received, torch.full((100_000,), float(left)), "batch_isend_irecv")
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            tensor = torch.zeros(1)
            sources.add(dist.recv(tensor))
        assert sources == set(range(1, size))
    else:
        dist.send(torch.ones(1), 0)


def test_messages_between_two_ranks():
    run_ranks(2, point_to_point)
    run_ranks(3, point_to_point)


def objects(rank):
    size = dist.get_world_size()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "pad": "x" * (100 * rank)})
    assert [item["rank"] for item in gathered] == list(range(size))
    sent = [{"a": 1}, "text", rank] if rank == 1 else [None, None, None]
    dist.broadcast_object_list(sent, src=1)
    assert sent == [{"a": 1}, "text", 1]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    collected = [None] * size if rank == 0 else None
    dist.gather_object(rank * 2, collected, dst=0)
    assert rank != 0 or collected == [2 * r for r in range(size)]


def test_objects_cross():
    run_ranks(3, objects)


def groups(rank):
    assert dist.get_backend() == "shm"
    dist.barrier()
    dist.monitored_barrier()
    dist.monitored_barrier(wait_all_ranks=True)
    odd = dist.new_group([1, 3], backend="shm")
    even = dist.new_group([0, 2])
    mine = odd if rank % 2 else even
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == (4 if rank % 2 else 2)
    # Several operations at once, on several groups.
    tensors = [torch.full((1000,), float(i + rank)) for i in range(20)]
    works = [
        dist.all_reduce(tensor, group=(mine if i % 2 else None), async_op=True)
        for i, tensor in enumerate(tensors)
    ]
    for work in works:
        work.wait()
    for i, tensor in enumerate(tensors):
        members = ([1, 3] if rank % 2 else [0, 2]) if i % 2 else range(4)
        same(tensor, torch.full((1000,), float(sum(i + r for r in members))), f"async {i}")
    dist.destroy_process_group(mine)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    assert not dist.is_initialized()


def test_groups_come_and_go():
    run_ranks(4, groups)


def both_names(rank):
    import tessera

    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), 2.0), "all_reduce")
    return tessera.comm.engine()


@pytest.mark.parametrize("backend", ["shm", "cpu:shm"])
def test_backend_goes_by_name_and_by_device(backend):
    assert run_ranks(2, both_names, backend=backend) == ["shm", "shm"]


def test_engine_can_be_chosen_by_the_environment():
    assert run_ranks(2, both_names, env={"TESSERA_ENGINE": "gloo"}) == ["gloo", "gloo"]


def again(rank):
    for _ in range(3):
        dist.destroy_process_group()
        dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
        dist.barrier()


def test_world_of_one_can_be_made_again_and_again():
    run_ranks(1, again)


def functional(rank):
    from torch.distributed import _functional_collectives as functional_collectives

    tensor = functional_collectives.all_reduce(torch.full((4,), float(rank)), "sum", dist.group.WORLD)
    same(tensor + 0, torch.full((4,), 1.0), "functional all_reduce")
    work = dist.all_reduce(torch.ones(10), async_op=True)
    done = work.get_future().then(lambda future: future.value()[0] * 2)
    same(done.wait(), torch.full((10,), 4.0), "future")


def test_functional_collectives_and_futures_work():
    run_ranks(2, functional)
