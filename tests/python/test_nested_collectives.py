"""Collectives that a future's callback starts: the same order on all ranks, and no hang."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from hook_training import assert_same, make_model, run_steps
from ranks import run_ranks, run_ranks_collecting
from tessera.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel


def one_inside(rank):
    first, second = torch.full((3,), float(rank + 1)), torch.full((5,), float(10 * rank))
    dist.all_reduce(first, async_op=True).get_future().then(lambda _: dist.all_reduce(second)).wait()
    return first, second


def test_a_callback_may_call_a_collective():
    for first, second in run_ranks(3, one_inside):
        assert torch.equal(first, torch.full((3,), 6.0))
        assert torch.equal(second, torch.full((5,), 30.0))


def two_inside(rank):
    size = dist.get_world_size()
    results = []
    futures = []
    behind = []
    for turn in range(20):
        if turn % size == rank:
            time.sleep(0.002)  # the ranks queue what follows before or after the callbacks
        # Told apart by their sizes: in another order the engine would refuse them.
        a, b, c, d = (torch.full((100 * turn + k + 1,), float(rank + turn + k)) for k in range(4))

        def innermost(_, c=c, d=d):
            dist.all_reduce(c)
            dist.broadcast(d, src=size - 1)
            return c

        def inside(_, b=b, innermost=innermost):
            future = dist.all_reduce(b, async_op=True).get_future()
            return future.then(innermost).wait()

        futures.append(dist.all_reduce(a, async_op=True).get_future().then(inside))
        follower = torch.full((7000 + turn,), 1.0)
        behind.append((dist.all_reduce(follower, async_op=True), follower))
        results.append((a, b, c, d))
    for turn, (future, (a, b, c, d)) in enumerate(zip(futures, results, strict=True)):
        assert future.wait() is c
        total = size * (size - 1) / 2
        for k, tensor in enumerate((a, b, c)):
            assert torch.equal(tensor, torch.full_like(tensor, total + size * (turn + k)))
        assert torch.equal(d, torch.full_like(d, size - 1 + turn + 3.0))
    for work, follower in behind:
        work.wait()
        assert torch.equal(follower, torch.full_like(follower, float(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_callbacks_inside_callbacks_keep_one_order(size, engine):
    run_ranks(size, two_inside, env={"TESSERA_ENGINE": engine})


def groups_in_turn(rank):
    # A hierarchical mean: inside a pair, between the pairs, back to the pair.
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    lanes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair, lane = pairs[rank // 2], lanes[rank % 2]
    futures = []
    tensors = [torch.full((50 + turn,), float(rank + turn)) for turn in range(20)]

    for tensor in tensors:

        def between(_, tensor=tensor):
            return dist.all_reduce(tensor, group=lane, async_op=True).get_future().wait()

        def back(future, tensor=tensor):
            future.value()
            dist.broadcast(tensor, src=2 * (rank // 2), group=pair)
            return tensor

        first = dist.all_reduce(tensor, group=pair, async_op=True).get_future()
        futures.append(first.then(between).then(back))
    for turn, future in enumerate(futures):
        assert torch.equal(future.wait(), torch.full((50 + turn,), 6.0 + 4 * turn))


def test_callbacks_may_use_several_groups():
    run_ranks(4, groups_in_turn)


def messages(rank):
    peer = 1 - rank
    received = [torch.zeros(3) for _ in range(4)]
    futures = []
    for turn, tensor in enumerate(received):
        sent = torch.full((3,), float(10 * turn + rank))

        def exchange(_, tensor=tensor, sent=sent):
            works = [dist.isend(sent, peer), dist.irecv(tensor, peer)]
            for work in works:
                work.wait()

        futures.append(dist.all_reduce(torch.ones(1), async_op=True).get_future().then(exchange))
    for future in futures:
        future.wait()
    assert [tensor[0].item() for tensor in received] == [10.0 * turn + peer for turn in range(4)]


def test_a_callback_may_send_and_receive():
    run_ranks(2, messages)


def different(rank):
    def inside(_):
        dist.all_reduce(torch.ones(3 + rank))

    dist.all_reduce(torch.ones(2), async_op=True).get_future().then(inside).wait()


def test_ranks_that_differ_inside_a_callback_are_told():
    for outcome in run_ranks_collecting(2, different):
        assert "rank 0 called all_reduce sum of float32 [3]" in outcome.error
        assert "rank 1 called all_reduce sum of float32 [4]" in outcome.error


def waits_for_its_follower(rank):
    later = []

    def inside(_):
        if threading.current_thread() is threading.main_thread():
            return None  # the first was done already, and its follower cannot come while this runs
        while not later:
            time.sleep(0.001)
        return later[0].get_future().wait()

    done = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(inside)
    later.append(dist.all_reduce(torch.ones(4), async_op=True))
    done.wait()


def test_a_callback_that_waits_for_what_comes_after_it_ends_at_the_limit():
    for outcome in run_ranks_collecting(2, waits_for_its_follower, env={"LIMIT": "2"}):
        # Unless the follower came before the callback began.
        assert not outcome.error or "Timed out after 2000 ms behind a callback" in outcome.error


needs_torchs_power_sgd = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="torch's own hook asks a CPU's gradients for their GPU where there is one",
)


def power_sgd(rank, wrapper, bucket_cap_mb):
    state = torch_power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model = make_model()
    parallel = wrapper(model, bucket_cap_mb=bucket_cap_mb)
    parallel.register_comm_hook(state, torch_power.powerSGD_hook)
    return run_steps(rank, model, parallel, 6)


@needs_torchs_power_sgd
def test_torchs_power_sgd_gives_what_gloo_gives():
    # One bucket: with several, Gloo's own threads may meet in different orders.
    theirs = run_ranks(2, power_sgd, TorchDistributedDataParallel, 25, backend="gloo")
    for wrapper in (TorchDistributedDataParallel, DistributedDataParallel):
        ours = run_ranks(2, power_sgd, wrapper, 25)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other, exact=False)


@needs_torchs_power_sgd
def test_torchs_power_sgd_takes_several_buckets():
    ours = run_ranks(2, power_sgd, DistributedDataParallel, 0.005)
    torchs = run_ranks(2, power_sgd, TorchDistributedDataParallel, 0.005)
    assert_same(ours[0], ours[1])
    assert_same(torchs[0], torchs[1])
    # Buckets of the same parameters, so of the same approximation.
    assert_same(ours[0], torchs[0], exact=False)
