"""tessera.common.gp_utils: every name of the reference page, under torch's own process groups."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera import graph_parallel
from tessera.common import gp_utils

SIGNATURES = {
    "ensure_div": "(a: 'int', b: 'int') -> 'None'",
    "divide_and_check_no_remainder": "(a: 'int', b: 'int') -> 'int'",
    "setup_gp": "(config) -> 'None'",
    "cleanup_gp": "() -> 'None'",
    "initialized": "() -> 'bool'",
    "get_dp_group": "()",
    "get_gp_group": "()",
    "get_dp_rank": "() -> 'int'",
    "get_gp_rank": "() -> 'int'",
    "get_dp_world_size": "() -> 'int'",
    "get_gp_world_size": "() -> 'int'",
    "pad_tensor": "(tensor: 'Tensor', dim: 'int' = -1, target_size: 'int | None' = None) -> 'Tensor'",
    "trim_tensor": "(tensor: 'Tensor', sizes: 'Tensor | None' = None, dim: 'int' = 0)",
    "_split_tensor": (
        "(tensor: 'Tensor', num_parts: 'int', dim: 'int' = -1, contiguous_chunks: 'bool' = False)"
    ),
    "_reduce": "(ctx: 'Any', input: 'Tensor') -> 'Tensor'",
    "_split": "(input: 'Tensor', dim: 'int' = -1) -> 'Tensor'",
    "_gather": "(input: 'Tensor', dim: 'int' = -1) -> 'Tensor'",
    "_gather_with_padding": "(input: 'Tensor', dim: 'int' = -1) -> 'Tensor'",
    "copy_to_model_parallel_region": "(input: 'Tensor') -> 'Tensor'",
    "reduce_from_model_parallel_region": "(input: 'Tensor') -> 'Tensor'",
    "scatter_to_model_parallel_region": "(input: 'Tensor', dim: 'int' = -1) -> 'Tensor'",
    "gather_from_model_parallel_region": "(input: 'Tensor', dim: 'int' = -1) -> 'Tensor'",
    # Of today's fairchem.
    "setup_graph_parallel_groups": (
        "(graph_parallel_group_size: 'int', distributed_backend: 'str | None') -> 'None'"
    ),
    "size_list_fn": "(size: 'int', parts: 'int') -> 'list[int]'",
    "pad_input": "(input: 'Tensor', padded_size: 'int') -> 'Tensor'",
    "gather_from_model_parallel_region_sum_grad": "(input: 'Tensor', natoms: 'int') -> 'Tensor'",
    "all_reduce_sum_with_grad": "(input: 'Tensor') -> 'Tensor'",
    "scale_backward_grad": "(input: 'Tensor') -> 'Tensor'",
    "get_gp_config": "() -> 'GraphParallelConfig | None'",
}
CLASSES = [
    "CopyToModelParallelRegion",
    "ReduceFromModelParallelRegion",
    "ScatterToModelParallelRegion",
    "GatherFromModelParallelRegion",
]


def test_every_name_has_its_signature():
    for name, signature in SIGNATURES.items():
        assert str(inspect.signature(getattr(gp_utils, name))) == signature, name
    for name in CLASSES:
        assert issubclass(getattr(gp_utils, name), torch.autograd.Function)
    assert gp_utils._GRAPH_PARALLEL_GROUP is None
    assert gp_utils._DATA_PARALLEL_GROUP is None


def set_up(size, backend="gloo"):
    gp_utils.setup_gp({"gp_gpus": size, "distributed_backend": backend})


def layout(rank, size, backend):
    world = dist.get_world_size()
    assert (gp_utils.get_gp_rank(), gp_utils.get_gp_world_size()) == (0, 1)
    assert (gp_utils.get_dp_rank(), gp_utils.get_dp_world_size()) == (rank, world)
    for _ in range(2):  # set up, tear down, set up again
        set_up(size, backend)
        assert gp_utils.initialized()
        gp = dist.get_process_group_ranks(gp_utils.get_gp_group())
        dp = dist.get_process_group_ranks(gp_utils.get_dp_group())
        assert gp == [rank // size * size + i for i in range(size)]
        assert dp == list(range(rank % size, world, size))
        assert (gp_utils.get_gp_rank(), gp_utils.get_gp_world_size()) == (rank % size, size)
        assert (gp_utils.get_dp_rank(), gp_utils.get_dp_world_size()) == (rank // size, world // size)
        with pytest.raises(ValueError, match="there already"):
            set_up(size, backend)
        gp_utils.cleanup_gp()
        assert not gp_utils.initialized()
        assert gp_utils.get_gp_group() is None


@pytest.mark.parametrize("backend", ["gloo", "shm", None])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_are_graphs_and_columns_are_data(size, backend):
    run_ranks(4, layout, size, backend, backend=backend or "gloo")


def refused(rank):
    set_up(3)


def test_a_size_that_does_not_divide_is_refused():
    for outcome in run_ranks_collecting(4, refused, backend="gloo"):
        assert outcome.error == (
            "ValueError: graph.setup_gp: 4 ranks cannot be divided into groups of 3. Choose 1, 2 or 4."
        )


def different_sizes(rank, others):
    set_up(2 if rank == 0 else others, None)


@pytest.mark.parametrize("others", [4, 3, 0])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_ranks_that_ask_for_different_sizes_are_told(backend, others):
    for outcome in run_ranks_collecting(4, different_sizes, others, backend=backend):
        assert (
            "graph.setup_gp: rank 0 asks for groups of 2, ranks 1, 2 and 3 for groups of "
            f"{others}. Give every rank the same configuration." in outcome.error
        )


def different_backends(rank):
    set_up(2, "gloo" if rank == 0 else "shm")


def test_ranks_that_ask_for_different_backends_are_told():
    for outcome in run_ranks_collecting(2, different_backends, backend="gloo"):
        assert "rank 1 for groups of 2 on another backend" in outcome.error


def different_rows(rank, shape, dtype, operator):
    parts = graph_parallel.Partition.contiguous(4, 2)
    edges = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1]])
    plan = graph_parallel.HaloPlan(parts, edges[:, graph_parallel.edges_of_part(edges, parts, rank)])
    rows = torch.ones(shape, dtype=dtype) if rank == 1 else torch.ones(2, 4)
    result = getattr(graph_parallel, operator)(rows, plan)
    return result.finish() if operator.endswith("async") else result


@pytest.mark.parametrize(
    ("operator", "shape", "dtype", "text"),
    [
        ("halo_exchange", (2, 3), torch.float32, "rank 1 rows of Float [3]"),
        ("halo_exchange", (2, 4), torch.float64, "rank 1 rows of Double [4]"),
        ("halo_exchange", (2, 2, 2), torch.float32, "rank 1 rows of Float [2, 2]"),
        ("halo_exchange_async", (2, 8), torch.float32, "rank 1 rows of Float [8]"),
        ("halo_accumulate", (2, 3), torch.float32, "rank 1 rows of Float [3]"),
        ("halo_extend", (2, 3), torch.float32, "rank 1 rows of Float [3]"),
        ("halo_exchange", (3, 4), torch.float32, "rank 1 brings 3 rows, the plan has 2"),
    ],
)
def test_rows_that_differ_are_refused_before_torchs_gloo_sees_them(operator, shape, dtype, text):
    for outcome in run_ranks_collecting(2, different_rows, shape, dtype, operator, backend="gloo"):
        assert text in outcome.error


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3), torch.float32), ((2, 4), torch.float64)])
def test_rows_that_differ_are_refused_by_shared_memory(shape, dtype):
    for outcome in run_ranks_collecting(2, different_rows, shape, dtype, "halo_exchange"):
        assert "comm.all_to_all" in outcome.error


def operators(rank):
    size = dist.get_world_size()
    set_up(size)
    for extent in (5, 6, 9, size, 1):
        whole = torch.arange(2.0 * extent).reshape(2, extent).requires_grad_()
        mine = gp_utils.scatter_to_model_parallel_region(whole)
        assert torch.equal(mine, gp_utils._split(whole))
        back = gp_utils.gather_from_model_parallel_region(mine)
        assert torch.equal(back, whole)
        assert torch.equal(gp_utils._gather_with_padding(mine.detach()), whole)
        weights = torch.arange(2.0 * extent).reshape(2, extent)
        (grad,) = torch.autograd.grad((back * weights).sum(), whole)
        assert torch.equal(grad, weights)
        mine = mine.detach()
        mine += 1  # not a view of anything
    x = torch.full((2, 2), float(rank), requires_grad=True)
    total = torch.full((2, 2), float(sum(range(size))))
    assert torch.equal(gp_utils.reduce_from_model_parallel_region(x), total)
    assert torch.equal(gp_utils._reduce(None, x), total)
    assert torch.equal(x.detach(), torch.full((2, 2), float(rank)))
    assert gp_utils._gather(x, 0).shape == (2 * size, 2)
    gp_utils.cleanup_gp()


def classes(rank):
    size = dist.get_world_size()
    set_up(size)
    w = torch.ones(3, requires_grad=True)
    x = torch.ones(3, requires_grad=True)
    (w * 1 + gp_utils.CopyToModelParallelRegion.apply(x)).sum().backward()
    assert torch.equal(w.grad, torch.ones(3))  # the sibling's gradient is its own
    assert torch.equal(x.grad, torch.full((3,), float(size)))
    y = torch.ones(3, requires_grad=True)
    gp_utils.ReduceFromModelParallelRegion.apply(y).sum().backward()
    assert torch.equal(y.grad, torch.ones(3))
    # Slices of 1, 2, ...: each gets the part of the gradient that belongs to it.
    z = torch.ones(rank + 1, requires_grad=True)
    whole = gp_utils.GatherFromModelParallelRegion.apply(z, 0)
    weights = torch.arange(float(whole.numel()))
    (grad,) = torch.autograd.grad((whole * weights).sum(), z, create_graph=True)
    first = rank * (rank + 1) // 2
    assert torch.equal(grad, weights[first : first + rank + 1])
    s = torch.ones(4, requires_grad=True)
    gp_utils.ScatterToModelParallelRegion.apply(s).sum().backward()
    assert torch.equal(s.grad, torch.ones(4))
    gp_utils.cleanup_gp()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_operators(size):
    run_ranks(size, operators, backend="gloo")
    run_ranks(size, classes, backend="gloo")


def shapes(rank):
    set_up(4)
    padded = gp_utils.pad_tensor(torch.ones(2, 5))
    assert padded.shape == (2, 8)
    assert padded[:, 5:].abs().sum() == 0
    sizes = torch.tensor([5, 4, 2])
    trimmed, left = gp_utils.trim_tensor(torch.arange(11), sizes)
    assert trimmed.shape == (8,)
    assert left.tolist() == [5, 3, 0]
    assert sizes.tolist() == [5, 4, 2]
    assert gp_utils.trim_tensor(torch.arange(11))[1] is None
    gp_utils.cleanup_gp()


def test_padding_and_trimming():
    run_ranks(4, shapes, backend="gloo")
    assert [t.numel() for t in gp_utils._split_tensor(torch.arange(9), 4)] == [3, 2, 2, 2]
    with pytest.raises(ValueError, match="7 is not divisible by 2"):
        gp_utils.ensure_div(7, 2)


def test_before_setup_everything_is_the_identity():
    x = torch.ones(3)
    assert gp_utils.copy_to_model_parallel_region(x) is x
    assert gp_utils._gather_with_padding(x) is x


def fairchem_names(rank):
    size = dist.get_world_size()
    gp_utils.setup_graph_parallel_groups(size, "gloo")
    assert gp_utils.get_gp_config() == gp_utils.GraphParallelConfig(group_size=size)
    natoms = 2 * size + 1
    sizes = gp_utils.size_list_fn(natoms, size)
    assert sum(sizes) == natoms and max(sizes) - min(sizes) == 1
    first = sum(sizes[:rank])
    whole = torch.arange(3.0 * natoms, dtype=torch.float64).reshape(natoms, 3)
    mine = whole[first : first + sizes[rank]].clone().requires_grad_()
    weights = [torch.full_like(whole, r + 1.0) + whole for r in range(size)]

    def energy(rows, r):
        return (weights[r] * rows**3).sum()

    joined = gp_utils.gather_from_model_parallel_region_sum_grad(mine, natoms)
    assert torch.equal(joined, whole)
    # Every rank uses all rows in its own way: a rank's gradient is the sum over all of them.
    (grad,) = torch.autograd.grad(energy(joined, rank), mine, create_graph=True)
    alone = whole.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sum(energy(alone, r) for r in range(size)), alone, create_graph=True)
    torch.testing.assert_close(grad, expected[first : first + sizes[rank]])
    # The squares of the rows' gradients over all ranks, differentiated again.
    (second,) = torch.autograd.grad((grad**2).sum(), mine)
    (expected,) = torch.autograd.grad((expected**2).sum(), alone)
    torch.testing.assert_close(second, expected[first : first + sizes[rank]])

    x = torch.full((2,), rank + 1.0, requires_grad=True)
    total = gp_utils.all_reduce_sum_with_grad(x)
    assert total.tolist() == [size * (size + 1) / 2] * 2
    (grad,) = torch.autograd.grad(((rank + 1) * total).sum(), x)
    assert grad.tolist() == [size * (size + 1) / 2] * 2
    y = gp_utils.scale_backward_grad(x)
    assert torch.equal(y, x)
    (grad,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    assert torch.equal(grad, 2 * size * x)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert second.tolist() == [2.0 * size * size] * 2
    gp_utils.cleanup_gp()
    assert gp_utils.get_gp_config() is None
    with pytest.raises(ValueError, match="larger than the world"):
        gp_utils.setup_graph_parallel_groups(2 * size, "gloo")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_names_of_todays_fairchem(backend):
    for size in (2, 3):
        run_ranks(size, fairchem_names, backend=backend)


def test_the_configuration_of_workers():
    resolve, config = gp_utils.resolve_gp_config_for_workers, gp_utils.GraphParallelConfig
    assert resolve(None, 1) is None
    given = config(mode=gp_utils.GPMode.ALL_TO_ALL)
    assert resolve(given, 4) == config(4, gp_utils.GPMode.ALL_TO_ALL)
    assert given.group_size == 1
    assert resolve(config(4), 4) == config(4)
    with pytest.raises(ValueError, match="groups of 2 ranks do not fit 4 workers"):
        resolve(config(2), 4)
    assert torch.equal(gp_utils.pad_input(torch.ones(2, 3), 4).sum(1), torch.tensor([3.0, 3.0, 0.0, 0.0]))


def fairchem_paths(rank):
    """The signatures of fairchem.core.common: rows are atoms, and every order of derivatives is right."""
    from tessera.core.common import gp_utils as today
    from tessera.core.common.parallelism import graph_parallel_a2a as a2a

    size = dist.get_world_size()
    owners = a2a.partition_atoms_index_split(7, size, "cpu")
    if size > 1:
        with pytest.raises(ValueError, match=f"rank {rank} of {size} is rank 0 of 1 of the graph-parallel"):
            a2a.build_gp_context(torch.zeros(2, 0, dtype=torch.long), owners, rank, size)
    today.setup_graph_parallel_groups(size, None)
    assert gp_utils.get_gp_world_size() == size  # the groups are those of the older path
    weights = torch.arange(21.0, dtype=torch.float64).reshape(7, 3) + 1

    def energy(rows, r):
        return ((r + 1) * weights * rows**3).sum()

    # Out of the whole, cut and joined again: the same as one process, also differentiated twice.
    whole = (weights / 7).clone().requires_grad_()
    mine = today.scatter_to_model_parallel_region(whole)
    assert mine.shape[0] == today.size_list_fn(7, size)[rank]
    joined = today.gather_from_model_parallel_region(mine * 2, 7)
    (grad,) = torch.autograd.grad(energy(joined, 0), whole, create_graph=True)
    (second,) = torch.autograd.grad((grad**2).sum(), whole)
    alone = (weights / 7).clone().requires_grad_()
    (expected,) = torch.autograd.grad(energy(alone * 2, 0), alone, create_graph=True)
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(second, torch.autograd.grad((expected**2).sum(), alone)[0])

    # Only the rows that edges need.
    edges = torch.stack([torch.arange(7).repeat_interleave(3), torch.arange(21) * 2 % 7])
    own = edges[:, owners[edges[1]] == rank]
    context = a2a.build_gp_context(own, owners, rank, size)
    nodes = (owners == rank).nonzero().flatten()
    rows = whole.detach()[nodes].requires_grad_()
    received = a2a.all_to_all_collect(rows, context)
    assert received.shape == (context.total_recv, 3) and context.total_local_atoms == len(nodes)
    sources = torch.cat([rows, received])[context.edge_index_local[0]]
    assert torch.equal(sources.detach(), whole.detach()[own[0]])
    (grad,) = torch.autograd.grad((sources**3).sum(), rows, create_graph=True)
    (second,) = torch.autograd.grad((grad**2).sum(), rows)
    alone = whole.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad((alone[edges[0]] ** 3).sum(), alone, create_graph=True)
    torch.testing.assert_close(grad, expected[nodes])
    torch.testing.assert_close(second, torch.autograd.grad((expected**2).sum(), alone)[0][nodes])
    if len(nodes) > 1:
        with pytest.raises(ValueError, match="node_partition is not what rank_assignments gives"):
            a2a.build_gp_context(own, owners, rank, size, nodes.flip(0))
    today.cleanup_gp()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_paths_of_todays_fairchem(backend):
    for size in (1, 2, 3):
        run_ranks(size, fairchem_paths, backend=backend)
