"""tessera.comm: collectives that return their result, meshes, and the reference's names."""

from __future__ import annotations

import pytest
import tessera
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera.distributed import collective_utils
from tessera.distributed import comm as topology


def rows_of(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count * 2, dtype=torch.float32).reshape(count, 2) + 100 * rank


def collectives(rank, backend):
    comm, size = tessera.comm, dist.get_world_size()
    group = dist.new_group(backend=backend)
    counts = [2 * r for r in range(size)]  # rank 0 has none
    everything = torch.cat([rows_of(r, counts[r]) for r in range(size)])
    assert torch.equal(comm.all_gather_v(rows_of(rank, counts[rank]), group), everything)
    assert torch.equal(comm.all_gather_v(rows_of(rank, counts[rank]), group, counts), everything)
    pending = comm.all_gather_v_async(rows_of(rank, counts[rank]), group, counts)
    pending.callbacks.append(lambda tensor: tensor + 1)
    assert torch.equal(pending.wait(), everything + 1)
    assert torch.equal(comm.all_gather(torch.full((1, 2), rank), group)[:, 0], torch.arange(size))

    whole = rows_of(rank, sum(counts))
    total = sum(rows_of(r, sum(counts)) for r in range(size))
    mine = total.split(counts)[rank]
    assert torch.equal(comm.reduce_scatter_v(whole, counts, group), mine)
    assert torch.equal(comm.reduce_scatter_v_async(whole, counts, group).wait(), mine)
    even = rows_of(rank, size)
    summed = sum(rows_of(r, size) for r in range(size))
    assert torch.equal(comm.reduce_scatter(even, group), summed[rank : rank + 1])
    assert torch.equal(comm.reduce_scatter_async(even, group).wait(), summed[rank : rank + 1])

    sends = [rank + r for r in range(size)]
    given = rows_of(rank, sum(sends))
    expected = torch.cat(
        [
            rows_of(r, sum(r + s for s in range(size))).split([r + s for s in range(size)])[rank]
            for r in range(size)
        ]
    )
    assert torch.equal(comm.all_to_all_v(given, sends, group), expected)
    assert torch.equal(comm.all_to_all_v(given, sends, group, sends), expected)
    assert torch.equal(comm.all_to_all_v_async(given, sends, group, sends).wait(), expected)
    assert torch.equal(comm.all_to_all(even, group), comm.all_to_all_async(even, group).wait())

    before = even.clone()
    assert torch.equal(comm.all_reduce(even, group), summed)
    assert torch.equal(comm.all_reduce_async(even, group).wait(), summed)
    assert torch.equal(even, before), "the input was written"
    assert torch.equal(comm.all_reduce_(even, group, dist.ReduceOp.MAX), rows_of(size - 1, size))
    assert torch.equal(even, rows_of(size - 1, size))
    reduced = comm.reduce(torch.full((2,), float(rank)), 1, group)
    assert rank != 1 or reduced.tolist() == [float(sum(range(size)))] * 2
    assert torch.equal(comm.broadcast_(rows_of(rank, 2), 1, group), rows_of(1, 2))
    gathered = comm.gather(rows_of(rank, counts[rank]), 1, group)
    assert torch.equal(gathered, everything) if rank == 1 else gathered.numel() == 0
    parts = comm.scatter(rows_of(rank, sum(counts)), counts, 0, group)
    assert torch.equal(parts, rows_of(0, sum(counts)).split(counts)[rank])
    comm.barrier(group)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_collectives_return_what_the_ranks_hold(backend):
    run_ranks(3, collectives, backend)


def meshes(rank):
    mesh = tessera.comm.Mesh({"data": 2, "vocab": 2})
    assert mesh.world is dist.group.WORLD
    assert mesh.axes == (("data", 2), ("vocab", 2))
    assert (mesh.coordinate("data"), mesh.coordinate("vocab")) == divmod(rank, 2)
    assert mesh.size("vocab") == 2
    data, vocab = mesh.group("data"), mesh.group("vocab")
    assert dist.get_process_group_ranks(vocab) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(data) == [rank % 2, rank % 2 + 2]
    assert dist.get_backend(vocab) == "shm"
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=vocab)
    assert tensor.item() == sum(dist.get_process_group_ranks(vocab))
    objects = [None, None]
    dist.all_gather_object(objects, rank, group=data)
    assert objects == dist.get_process_group_ranks(data)
    dist.broadcast(tensor, src=dist.get_global_rank(data, 0), group=data)
    # Groups that only some ranks make must not confuse the names of the next mesh.
    if rank < 2:
        tessera.comm.Mesh({"x": 2}, vocab)
    second = tessera.comm.Mesh([("a", 1), ("b", 2), ("c", 2)])
    assert second.group("a").size() == 1
    assert tessera.comm.all_gather(torch.tensor([rank]), second.group("c")).tolist() == (
        dist.get_process_group_ranks(vocab)
    )
    whole = second.flatten(["c", "b"])
    assert whole is second.flatten(["b", "c"])
    assert dist.get_process_group_ranks(whole) == [0, 1, 2, 3]
    assert tessera.comm.all_reduce(torch.tensor([1]), whole).item() == 4
    pair = tessera.comm.Mesh({"within": 2}, vocab)
    assert dist.get_process_group_ranks(pair.group("within")) == dist.get_process_group_ranks(vocab)
    from torch.distributed import _functional_collectives as functional

    assert functional.all_reduce(torch.ones(1), "sum", vocab).item() == 2
    dist.destroy_process_group(data)
    return repr(mesh)


def test_mesh_groups_are_groups_of_torch():
    assert run_ranks(4, meshes) == ["Mesh({'data': 2, 'vocab': 2})"] * 4


def bad_meshes(rank):
    errors = []
    for axes in ({"data": 3}, {}, {"": 2}, [("a", 1), ("a", 2)], {"a": 0}):
        with pytest.raises(ValueError, match=r"comm\.mesh") as info:
            tessera.comm.Mesh(axes)
        errors.append(str(info.value))
    mesh = tessera.comm.Mesh({"data": 2})
    with pytest.raises(ValueError, match="flatten takes different axes"):
        mesh.flatten(["data", "data"])
    with pytest.raises(ValueError, match="there is no axis 'vocab' in the mesh data 2") as info:
        mesh.group("vocab")
    return errors


def test_mesh_that_does_not_fit_is_refused():
    for errors in run_ranks(2, bad_meshes):
        assert errors == [
            "comm.mesh: data 3 makes 3 places for 2 ranks. The sizes must multiply to 2.",
            "comm.mesh: a mesh has at least one axis.",
            "comm.mesh: axis 0 has no name.",
            "comm.mesh: two axes are named 'a'.",
            "comm.mesh: axis 'a' has size 0.",
        ]


def different_meshes(rank):
    tessera.comm.Mesh({"data": 2, "vocab": 2} if rank != 3 else {"data": 4})


def test_ranks_that_ask_for_different_meshes_all_hear_it():
    for outcome in run_ranks_collecting(4, different_meshes):
        assert outcome.error == (
            "CommError: comm.mesh: rank 0 asks for data 2 x vocab 2, rank 3 for data 4. "
            "Give every rank the same axes."
        )


def in_mesh(rank):
    mesh = tessera.comm.Mesh({"vocab": 2})
    tessera.comm.all_reduce(torch.zeros(1 + rank), mesh.group("vocab"))


def test_errors_call_the_group_of_a_mesh_by_its_axis():
    for outcome in run_ranks_collecting(2, in_mesh):
        assert "group 'vocab'" in outcome.error


def where(rank):
    intra, cross = topology.intra_and_cross_node_pg()
    assert topology.intra_and_cross_node_pg() == (intra, cross)
    assert topology.intra_and_cross_node_pg(torch.device("meta")) == (None, None)
    gloo, _ = topology.intra_and_cross_node_pg(torch.device("cpu"), backend="gloo")
    assert dist.get_backend(gloo) == "gloo"
    total = torch.tensor([rank])
    dist.all_reduce(total, group=intra)
    dist.barrier()  # Gloo may still be connecting on another rank
    return (
        topology.get_local_size(),
        topology.get_local_rank(),
        topology.get_group_rank(),
        topology.get_num_groups(),
        dist.get_process_group_ranks(intra),
        dist.get_process_group_ranks(cross),
        total.item(),
    )


def two_hosts(rank):
    import os

    # What a launcher on two hosts with two ranks each would say.
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2",
        GROUP_RANK=str(rank // 2), MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    return where(rank)


def test_ranks_know_their_host():
    assert run_ranks(2, where) == [
        (2, 0, 0, 1, [0, 1], [0], 1),
        (2, 1, 0, 1, [0, 1], [1], 1),
    ]
    assert run_ranks(4, two_hosts) == [
        (2, 0, 0, 2, [0, 1], [0, 2], 1),
        (2, 1, 0, 2, [0, 1], [1, 3], 1),
        (2, 0, 1, 2, [2, 3], [0, 2], 5),
        (2, 1, 1, 2, [2, 3], [1, 3], 5),
    ]


def test_host_arithmetic_needs_no_group():
    assert topology.get_local_size(8) == 8
    assert topology.get_local_rank(8, 5) == 5
    assert topology.get_group_rank(8, 5) == 0
    assert topology.get_num_groups(8) == 1


def leaders(rank):
    world = dist.group.WORLD
    calls = []

    def allocate(first, *, step=1):
        calls.append(rank)
        return {"id": first + step, "by": rank}

    invoke = collective_utils.invoke_on_rank_and_broadcast_result
    assert invoke(world, 1, allocate, 40, step=2) == {"id": 42, "by": 1}
    assert calls == ([1] if rank == 1 else [])
    assert invoke(world, 0, lambda: None) is None
    assert torch.equal(invoke(world, 0, lambda: torch.arange(5)), torch.arange(5))

    @collective_utils.run_on_leader(world, 2)
    def named():
        """Says who."""
        return rank

    assert named() == 2
    assert named.__name__ == "named"
    assert named.__doc__ == "Says who."
    assert collective_utils.is_leader(world) == (rank == 0)
    assert collective_utils.is_leader(world, leader_rank=2) == (rank == 2)
    assert collective_utils.is_leader(None)


def test_leader_works_for_all():
    run_ranks(3, leaders)


def failing_leader(rank):
    errors = []
    group = dist.new_group([1, 2])
    if rank == 0:
        return errors

    @collective_utils.run_on_leader(group, 1)
    def fail():
        raise LookupError("no such table")

    @collective_utils.run_on_leader(group, 1)
    def unpicklable():
        return lambda: None

    for function in (fail, unpicklable):
        try:
            function()
        except Exception as error:
            errors.append((type(error).__name__, str(error), getattr(error, "kind", None)))
    assert tessera.comm.all_reduce(torch.ones(1), group).item() == 2  # the group is still good
    return errors


def test_exception_of_the_leader_reaches_every_rank():
    _, first, second = run_ranks(3, failing_leader)
    assert second[0] == ("LookupError", "no such table", None)
    assert first[0] == (
        "CommError",
        "comm.invoke_on_rank: rank 2 raised LookupError: no such table",
        "peer failed",
    )
    assert "pickle" in second[1][1]
    assert first[1][1].startswith("comm.invoke_on_rank: rank 2 raised ")


def bad_leader(rank):
    with pytest.raises(ValueError, match="7 is not a rank of a group of 2"):
        collective_utils.invoke_on_rank_and_broadcast_result(dist.group.WORLD, 7, lambda: 1)


def test_leader_must_be_in_the_group():
    run_ranks(2, bad_leader)
