"""Rarer calls of torch.distributed over the backend "shm": what Gloo gives, or what NCCL promises."""

from __future__ import annotations

import datetime
import logging
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from torch.distributed import distributed_c10d as c10d


def both_groups():
    return dist.new_group(backend="shm"), dist.new_group(backend="gloo")


def mine(rank, count=3, shape=(2,)):
    return [torch.full(shape, float(10 * rank + i)) for i in range(count)]


def gather_coalesced(rank):
    size = dist.get_world_size()
    results = []
    for group in both_groups():
        outputs = [[torch.zeros(2), torch.zeros(3, 2)] for _ in range(size)]
        inputs = [torch.full((2,), float(rank)), torch.full((3, 2), rank + 0.5)]
        dist.all_gather_coalesced(outputs, inputs, group=group)
        results.append(outputs)
    torch.testing.assert_close(*results, rtol=0, atol=0)
    output = [torch.zeros(2 * size), torch.zeros(3 * size)]
    with dist._coalescing_manager(group=dist.group.WORLD):
        dist.all_gather_into_tensor(output[0], torch.full((2,), float(rank)))
        dist.all_gather_into_tensor(output[1], torch.full((3,), -float(rank)))
    assert output[0].tolist() == [float(r) for r in range(size) for _ in range(2)]
    assert output[1].tolist() == [-float(r) for r in range(size) for _ in range(3)]


def test_all_gather_coalesced():
    run_ranks(3, gather_coalesced)


def several(rank):
    size = dist.get_world_size()
    results = {}
    for group in both_groups():
        collected = []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            options = dist.AllreduceOptions()
            options.reduceOp = op
            tensors = mine(rank)
            group.allreduce(tensors, options).wait()
            collected.append(tensors)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = size - 1, 2
        tensors = mine(rank)
        group.broadcast(tensors, options).wait()
        collected.append(tensors)
        outputs = [[torch.zeros(2) for _ in range(3 * size)] for _ in range(3)]
        group.allgather(outputs, mine(rank)).wait()
        collected.extend(outputs)
        results[dist.get_backend(group)] = collected
    torch.testing.assert_close(results["shm"], results["gloo"], rtol=0, atol=0)


def test_several_tensors_per_call():
    run_ranks(2, several)


def group_of_one(rank):
    # Each rank makes its own, under the same name as the others'.
    own = dist.new_group([rank])
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1])
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=own)
    assert tensor.tolist() == [rank] * 3
    dist.all_reduce(tensor, group=pair)
    return tensor[0].item()


def test_ranks_may_make_groups_of_their_own():
    assert run_ranks(4, group_of_one) == [1.0, 1.0, 5.0, 5.0]


def new_limit(rank):
    c10d._set_pg_timeout(datetime.timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"in 1 s .* Timed out"):
            dist.barrier()
    else:
        time.sleep(3)
    return True


def test_the_limit_of_a_group_can_be_set():
    # The limit the group began with is 20 seconds.
    outcomes = run_ranks_collecting(2, new_limit)
    assert outcomes[0].value, outcomes[0].error


def numbers(rank):
    group = dist.group.WORLD
    group._set_sequence_number_for_group()  # begins at the same number on all ranks
    engine = group._get_backend(torch.device("cpu"))
    found = [group._get_sequence_number_for_group()]
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce_coalesced([torch.ones(1), torch.ones(2)]),
        lambda: dist.broadcast(torch.ones(1), src=0),
        dist.barrier,
    ):
        call()
        found.append(group._get_sequence_number_for_group() - found[0])
        assert group._get_sequence_number_for_group() == engine._get_sequence_number_for_group()
    mixed, gloo = dist.new_group(backend="cpu:shm"), dist.new_group(backend="gloo")
    first = [part._get_sequence_number_for_group() for part in (mixed, gloo)]
    for part in (mixed, gloo):
        dist.all_reduce(torch.ones(1), group=part)
    second = [part._get_sequence_number_for_group() for part in (mixed, gloo)]
    assert [b - a for a, b in zip(first, second, strict=True)] == [1, 1]
    return found[1:]


def test_sequence_numbers_count_collectives():
    assert run_ranks(2, numbers) == [[1, 2, 3, 4]] * 2


def to_oneself(rank):
    received = torch.zeros(2, 3)
    # torch's functions refuse it for all backends; the group does not.
    work = dist.group.WORLD.recv([received], rank, 4)
    dist.group.WORLD.send([torch.arange(6.0) + rank], rank, 4).wait()
    work.wait()
    assert torch.equal(received, (torch.arange(6.0) + rank).view(2, 3))


def test_a_rank_may_send_to_itself():
    run_ranks(2, to_oneself)


def scaled_sums(rank):
    size = dist.get_world_size()
    expected = sum((r + 1) * 0.5 for r in range(size))
    halves = [dist._make_nccl_premul_sum(0.5), dist._make_nccl_premul_sum(torch.tensor([0.5]))]
    for half in halves:
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor, half)
        assert tensor.tolist() == [expected] * 3
        tensor = torch.full((3,), rank + 1.0)
        dist.reduce(tensor, 0, half)
        assert tensor.tolist() == [expected if rank == 0 else rank + 1.0] * 3
        output, whole = torch.zeros(2), torch.full((2 * size,), rank + 1.0)
        dist.reduce_scatter_tensor(output, whole, half)
        assert output.tolist() == [expected] * 2
        assert whole.tolist() == [rank + 1.0] * (2 * size)
        dist.reduce_scatter(output, [torch.full((2,), rank + 1.0) for _ in range(size)], half)
        assert output.tolist() == [expected] * 2
    # Every rank its own factor.
    tensor = torch.ones(2)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(float(rank)))
    assert tensor.tolist() == [size * (size - 1) / 2] * 2
    with pytest.raises(TypeError, match="scaled sum of Long"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), halves[0])


def test_sums_may_be_scaled():
    run_ranks(3, scaled_sums)


def events(rank):
    size = dist.get_world_size()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        tensor = torch.ones(2, 5)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.all_gather([torch.zeros(2, 5) for _ in range(size)], tensor)
        dist.all_to_all_single(torch.zeros(2 * size), torch.zeros(2 * size))
        dist.barrier()
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    found = {}
    for event in profile.events():
        if event.name.startswith("shm:"):
            found.setdefault(event.name, []).append(event.input_shapes)
    return found


def test_profiler_events_have_torchs_names():
    for rank, found in enumerate(run_ranks(2, events)):
        assert found.pop("shm:send" if rank == 0 else "shm:recv") == [[[2, 5]]]
        assert found == {
            "shm:all_reduce": [[[2, 5]]] * 2,
            "shm:broadcast": [[[2, 5]]],
            "shm:reduce": [[[2, 5]]],
            "shm:all_gather": [[[2, 5]]],
            "shm:all_to_all": [[[4]]],
            "shm:barrier": [[]],
        }


def dtensor_shards(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("torch.distributed.tensor._collective_utils").addHandler(handler)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for shape in ((4, 6), (5, 7), (8, 2, 3)):
        whole = torch.arange(float(torch.tensor(shape).prod())).view(shape)
        moved = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(placements=[Shard(1)])
        assert torch.equal(moved.full_tensor(), whole)
        expected = distribute_tensor(whole, mesh, [Shard(1)])
        assert torch.equal(moved.to_local(), expected.to_local())
    return [text for text in said if "alltoall" in text]


def test_dtensor_moves_shards_by_all_to_all():
    assert run_ranks(3, dtensor_shards) == [[]] * 3


def too_late(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    time.sleep(3)


def test_a_passed_limit_says_timed_out():
    assert "Timed out" in run_ranks_collecting(2, too_late, env={"LIMIT": "1"})[0].error


def late_for_a_monitored_barrier(rank):
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    own = dist.new_group([0, 1, 2])
    if rank == 0:
        # torch's programs look for its words, and for " Timed out " with a space on either side.
        with pytest.raises(
            RuntimeError, match=r"rank 1 in 1 s .* Timed out .* Rank 1 failed to pass monitoredB"
        ):
            dist.monitored_barrier(dist.new_group([0, 1]), 1)
        with pytest.raises(RuntimeError, match=r"Ranks 1, 2 failed to pass monitoredBarrier\."):
            dist.monitored_barrier(own, 1, wait_all_ranks=True)
        # No limit is no time, and not the group's limit.
        with pytest.raises(RuntimeError, match=r"Rank 0 timed out in monitoredBarrier after 0 ms\."):
            dist.monitored_barrier(timeout=0)
    else:
        dist.new_group([0, 1])
        time.sleep(4)
    return True


def test_a_monitored_barrier_says_who_is_late_in_torchs_words():
    outcomes = run_ranks_collecting(3, late_for_a_monitored_barrier)
    assert outcomes[0].value, outcomes[0].error


def wait_for_the_last_at_a_monitored_barrier(rank):
    store = dist.distributed_c10d._get_default_store()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    if rank == 2:
        store.wait(["told_0", "told_1"], datetime.timedelta(seconds=60))
        return ""
    with pytest.raises(RuntimeError) as error:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=5))
    store.set(f"told_{rank}", "")
    return str(error.value)


def test_every_rank_at_a_monitored_barrier_is_told_who_is_late():
    # torch tells the others that rank 0 is gone.
    outcomes = run_ranks_collecting(3, wait_for_the_last_at_a_monitored_barrier)
    for outcome in outcomes[:2]:
        assert "no answer from rank 2 in 5 s" in outcome.value, outcome
        assert "Rank 2 failed to pass monitoredBarrier." in outcome.value, outcome


def sharded_on_rank_0(rank):
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata

    group = dist.new_group(backend="shm")  # made after torch's module is there
    metadata = ShardMetadata(shard_offsets=[0, 0], shard_sizes=[4, 2], placement="rank:0/cpu")
    own = [sharded_tensor.Shard(torch.ones(4, 2), metadata)] if rank == 0 else []
    return str(sharded_tensor.init_from_local_shards(own, 4, 2, process_group=group).device)


def test_a_sharded_tensor_is_on_the_cpu_where_a_rank_has_no_part_of_it():
    assert run_ranks(2, sharded_on_rank_0) == ["cpu", "cpu"]
