"""tessera.regions and tessera.graph_parallel, ranks as processes, under torch's own groups and shm."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera import graph_parallel as graph
from tessera import regions

BACKENDS = ["gloo", "shm"]


def values(rank):
    size = dist.get_world_size()
    sizes = [r % 3 for r in range(size)]  # rank 0 has none
    slices = [torch.arange(2.0 * s).reshape(2, s) + 10 * r for r, s in enumerate(sizes)]
    whole = torch.cat(slices, 1)
    group = dist.group.WORLD
    for given in (None, sizes):
        assert torch.equal(regions.gather(slices[rank], group, -1, given), whole)
        assert torch.equal(regions.gather_shared(slices[rank], group, 1, given), whole)
    assert torch.equal(regions.scatter(whole, group, 1, sizes), slices[rank])
    assert torch.equal(regions.reduce(whole), whole * size)
    assert torch.equal(regions.all_reduce(whole), whole * size)
    assert torch.equal(regions.reduce_scatter(whole, dim=1, sizes=sizes), slices[rank] * size)
    assert torch.equal(regions.copy(whole), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values(backend):
    for size in (1, 2, 3, 4):
        run_ranks(size, values, backend=backend)


def differentiate(positions, energy):
    (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
    (second,) = torch.autograd.grad((forces**2).sum(), positions, create_graph=True)
    (third,) = torch.autograd.grad((second**3).sum(), positions)
    return [t.detach() for t in (energy, forces, second, third)]


NODES = 7


def sample():
    generator = torch.Generator().manual_seed(3)
    positions = torch.randn(NODES, 3, dtype=torch.float64, generator=generator)
    edges = torch.randint(0, NODES, (2, 16), generator=generator)
    return positions.requires_grad_(), edges


def messages(rows, targets, positions, edges):
    distance = (positions[edges[0]] - positions[edges[1]]).pow(2).sum(1, keepdim=True)
    return torch.zeros(targets, 3, dtype=rows.dtype).index_add(
        0, edges[1], torch.sin(rows[edges[0]] + distance)
    )


def network_alone():
    positions, edges = sample()
    h = positions.sin()
    for _ in range(2):
        h = h + messages(h, NODES, positions, edges)
    return differentiate(positions, (h * h).sum())


def network_split(rank, in_phases):
    size = dist.get_world_size()
    positions, edges = sample()
    # Scattered owners; the last of three and more owns nothing.
    parts = graph.Partition.from_owners(torch.arange(NODES) * 5 % max(1, min(size, size - (size > 2))), size)
    mine = edges[:, graph.edges_of_part(edges, parts, rank)]
    plan = graph.HaloPlan(parts, mine)
    plan.verify()
    places = regions.copy(positions)[plan.nodes]
    h = places[: plan.num_owned].sin()
    inner, outer = plan.local_edges[:, plan.interior], plan.local_edges[:, plan.boundary]
    for _ in range(2):
        if in_phases:
            pending = graph.halo_exchange_async(h, plan)
            inside = messages(h, plan.num_owned, places, inner)
            rows = torch.cat([h, pending.finish()])
            h = h + inside + messages(rows, plan.num_owned, places, outer)
        else:
            h = h + messages(graph.halo_extend(h, plan), plan.num_owned, places, plan.local_edges)
    return differentiate(positions, regions.reduce((h * h).sum()))


@pytest.mark.parametrize("in_phases", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_split_network_equals_one_process(backend, in_phases):
    expected = network_alone()
    for size in (1, 2, 3, 4):
        for answer in run_ranks(size, network_split, in_phases, backend=backend):
            for ours, theirs in zip(answer, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12 * theirs.abs().max().item())


def disagree(rank):
    regions.gather(torch.ones(2, 2), dim=rank)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_disagree_are_told(backend):
    for outcome in run_ranks_collecting(2, disagree, backend=backend):
        assert outcome.error.startswith("CommError: regions.gather: rank 0 calls gather(Float [2, 2], dim 0)")


def wrong_dimension(rank):
    regions.scatter(torch.ones(2), dim=3)


def test_a_wrong_argument_is_a_value_error():
    for outcome in run_ranks_collecting(2, wrong_dimension, backend="gloo"):
        assert outcome.error.startswith("ValueError: regions.scatter: there is no dimension 3")


def test_partitions():
    positions = torch.rand(50, 3, dtype=torch.float64)
    for make in (graph.Partition.morton, graph.Partition.hilbert, graph.Partition.recursive_bisection):
        parts = make(positions, 4, cell=torch.eye(3, dtype=torch.float64))
        assert sorted(parts.sizes) == [12, 12, 13, 13]
        assert torch.equal(parts.permutation[parts.inverse], torch.arange(50))
    assert graph.Partition.contiguous([1, 4]).offsets == [0, 1, 5]
    with pytest.raises(ValueError, match="node 0 is owned by 3"):
        graph.Partition.from_owners(torch.tensor([3]), 2)


def test_neighbour_sum_is_differentiable():
    edges = torch.tensor([[0, 1, 2, 2], [0, 0, 1, 0]])
    adjacency = graph.Adjacency(edges, 3, 2)
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    function = lambda r, w: graph.neighbour_sum(r, adjacency, w)  # noqa: E731
    assert torch.autograd.gradcheck(function, (rows, weights))
    assert torch.autograd.gradgradcheck(function, (rows, weights))


def plan_fields(rank):
    parts = graph.Partition.contiguous(4, 2)
    edges = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1]])
    plan = graph.HaloPlan(parts, edges[:, graph.edges_of_part(edges, parts, rank)])
    plan.verify()
    names = [name for name in vars(graph.HaloPlan) if isinstance(vars(graph.HaloPlan)[name], property)]
    fields = {name: getattr(plan, name) for name in names}
    return {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in fields.items()}


def test_fields_are_attributes_of_their_classes():
    # What editors, help() and hasattr on the class see.
    fields = [
        "num_nodes",
        "num_parts",
        "is_contiguous",
        "sizes",
        "offsets",
        "owners",
        "permutation",
        "inverse",
    ]
    for name in fields:
        assert isinstance(vars(graph.Partition)[name], property) and vars(graph.Partition)[name].__doc__
    parts = graph.Partition.contiguous(5, 2)
    assert {name for name in dir(parts) if name[0] != "_"} >= {*fields, "nodes_of", "owner_of"}
    assert (parts.offsets, parts.inverse.tolist()) == ([0, 3, 5], [0, 1, 2, 3, 4])
    with pytest.raises(AttributeError, match="no attribute 'size'"):
        parts.size  # noqa: B018
    found = run_ranks(2, plan_fields)[0]
    assert found == {
        "num_owned": 2, "num_halo": 2, "num_local": 4, "num_sent": 2, "nodes": [0, 1, 2, 3],
        "halo_nodes": [2, 3], "send_index": [0, 1], "send_rows": [0, 2], "recv_rows": [0, 2],
        "local_edges": [[2, 3], [0, 1]], "interior": [], "boundary": [0, 1],
    }  # fmt: skip


def one_sided(rank, joins):
    """Rank 1 needs a row of rank 0, which needs none; rows of one dimension, differentiated twice."""
    edges = torch.tensor([[0, 1, 2, 3, 0], [0, 1, 2, 3, 2]])
    partition = graph.Partition.contiguous(4, 2)
    plan = graph.HaloPlan(partition, edges[:, partition.owner_of(edges[1]) == rank])
    mine = (torch.arange(2.0) + 1 + 2 * rank).requires_grad_()
    rows = torch.cat([mine, graph.halo_exchange(mine, plan)]) if joins else graph.halo_extend(mine, plan)
    (grad,) = torch.autograd.grad((rows[plan.local_edges[0]] ** 3).sum(), mine, create_graph=True)
    return torch.autograd.grad((grad**2).sum(), mine)[0].tolist()


def test_rows_of_one_dimension_are_joined_by_halo_extend():
    whole = (torch.arange(4.0) + 1).requires_grad_()
    sources = whole[torch.tensor([0, 1, 2, 3, 0])]
    (grad,) = torch.autograd.grad((sources**3).sum(), whole, create_graph=True)
    (expected,) = torch.autograd.grad((grad**2).sum(), whole)
    first, second = run_ranks(2, one_sided, False)
    assert first + second == expected.tolist()
    # What docs/graph_parallel.md warns of: torch.cat leaves the empty part out, and its exchange with it.
    for outcome in run_ranks_collecting(2, one_sided, True):
        assert "Give every rank the same table of sizes" in outcome.error
