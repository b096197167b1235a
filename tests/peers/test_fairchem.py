"""fairchem's own graph parallelism against ours: `fairchem.core.common` beside `tessera.core.common`."""

from __future__ import annotations

import enum
import functools

import fairchem_program
import pytest
import torch
import torch.distributed as dist
from projects import need, only_files_of, stand_in
from two_sides import Side

from ranks import run_ranks  # isort: skip

need("fairchem")
OURS, THEIRS = Side("tessera.core.common"), Side("fairchem.core.common")


class _Texts(str, enum.Enum):  # noqa: UP042  (fairchem's, where its members are compared with texts)
    pass


@functools.cache
def fairchem():
    only_files_of("fairchem", "core", "core.common", "core.common.parallelism")
    stand_in("omegaconf", OmegaConf=type("OmegaConf", (), {"is_config": staticmethod(lambda config: False)}))
    stand_in("fairchem.core.common.utils", StrEnum=_Texts)


def rows(count):
    return torch.arange(3.0 * count, dtype=torch.float64).reshape(count, 3) / 7


def operators(rank):
    fairchem()
    size = dist.get_world_size()
    found = []
    for side in (OURS, THEIRS):
        gp = side("gp_utils")
        gp.setup_graph_parallel_groups(size, "gloo")
        assert (gp.get_gp_rank(), gp.get_gp_world_size(), gp.get_gp_config().group_size) == (rank, size, size)
        values = []
        for count in (2 * size + 1, 3 * size):
            sizes = gp.size_list_fn(count, size)
            whole = rows(count).requires_grad_()
            mine = gp.scatter_to_model_parallel_region(whole)
            assert mine.shape[0] == sizes[rank]
            weights = rows(count).flip(0) + 1
            for name in ("gather_from_model_parallel_region", "gather_from_model_parallel_region_sum_grad"):
                joined = getattr(gp, name)(mine, count)
                (gradient,) = torch.autograd.grad((joined**2 * weights * (rank + 1)).sum(), whole)
                values += [joined.detach(), gradient]
        x = rows(6)[rank : rank + 2].clone().requires_grad_()
        for name in ("reduce_from_model_parallel_region", "all_reduce_sum_with_grad", "scale_backward_grad"):
            value = getattr(gp, name)(x)
            (gradient,) = torch.autograd.grad(((rank + 1) * value**2).sum(), x)
            values += [value.detach(), gradient]
        for name in ("GatherFromModelParallelRegionGradPadded", "GatherFromModelParallelRegionSumGradPadded"):
            parts = getattr(gp, name).apply(x)
            (gradient,) = torch.autograd.grad(sum((p**2 * (rank + i)).sum() for i, p in enumerate(parts)), x)
            values += [*(part.detach() for part in parts), gradient]
        for name in ("ReduceFromModelParallelRegion", "AllReduceSumWithGrad", "ScaleBackwardGrad"):
            values.append(getattr(gp, name).apply(x).detach())
        values.append(gp.pad_input(x.detach(), 5))
        found.append(values)
        gp.cleanup_gp()
        assert gp.get_gp_config() is None
    assert len(found[0]) == len(found[1])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_operators(world):
    run_ranks(world, operators, backend="gloo")


def graph(count=17):
    generator = torch.Generator().manual_seed(2)
    places = torch.rand(count, 3, generator=generator)
    near = torch.cdist(places, places) < 0.6
    return places, near.nonzero().t().contiguous()


def exchanges(rank):
    fairchem()
    size = dist.get_world_size()
    places, edges = graph()
    found = []
    for side in (OURS, THEIRS):
        gp = side("gp_utils")
        gp.setup_graph_parallel_groups(size, "gloo")
        a2a = side("parallelism.graph_parallel_a2a")
        owners, nodes = a2a.compute_a2a_partition(
            places, len(places), "cpu", size, rank, a2a.PartitionStrategy.INDEX_SPLIT
        )
        own_edges = edges[:, owners[edges[1]] == rank]
        context = a2a.build_gp_context(own_edges, owners, rank, size, nodes)
        x = rows(len(places))[nodes].requires_grad_()
        received = a2a.all_to_all_collect(x, context)
        sources = torch.cat([x, received])[context.edge_index_local[0]]
        (gradient,) = torch.autograd.grad((sources**3 * (rank + 1)).sum(), x)
        named = {name: getattr(context, name) for name in vars(fairchem_context())}
        found.append(
            {**named, "received": received.detach(), "gradient": gradient, "sources": sources.detach()}
        )
        gp.cleanup_gp()
    ours, theirs = found
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12, msg=name)
        else:
            assert ours[name] == value, name


def fairchem_context():
    """An object with the names of fairchem's record."""
    record = THEIRS("parallelism.graph_parallel_a2a").GPContext
    return record(**dict.fromkeys(record.__dataclass_fields__))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_that_edges_need(world):
    run_ranks(world, exchanges, backend="gloo")


def test_parts_of_a_cloud():
    fairchem()
    places, _ = graph(50)
    for ranks in (1, 3, 4):
        found = [
            side("parallelism.graph_partition").partition_atoms_spatial(places, ranks)
            for side in (OURS, THEIRS)
        ]
        ours, theirs = (torch.bincount(owners, minlength=ranks) for owners in found)
        assert sorted(ours.tolist()) == sorted(theirs.tolist())
    for count in (2, 10, 11):
        split = [
            side("parallelism.graph_partition").partition_atoms_index_split(count, 4, "cpu")
            for side in (OURS, THEIRS)
        ]
        assert torch.equal(*split)


def test_no_public_name_is_missing():
    fairchem()
    for module in ("gp_utils", "parallelism.graph_partition", "parallelism.graph_parallel_a2a"):
        theirs = {
            name
            for name, value in vars(THEIRS(module)).items()
            if not name.startswith("_")
            and getattr(value, "__module__", "").startswith("fairchem.core.common")
        }
        assert theirs - set(vars(OURS(module))) <= {"StrEnum"}


def trained(rank, mode, group, steps, sides):
    """The same training by either import, and without graph parallelism on every rank for itself."""
    fairchem()
    found = {side: fairchem_program.train(side, steps, mode, group) for side in ("tessera", *sides)}
    for side in sides:
        torch.testing.assert_close(
            found["tessera"], found[side], rtol=0, atol=1e-9, msg=lambda m, s=side: f"{s}: {m}"
        )
    return found["tessera"][0]


BOTH = ("fairchem", "alone")


@pytest.mark.parametrize("mode", ["allgather", "all_to_all"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_training(world, mode):
    losses, *_ = run_ranks(world, trained, mode, world, 50, BOTH, backend="gloo", limit=120)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])  # it learns


@pytest.mark.parametrize("mode", ["allgather", "all_to_all"])
def test_training_in_two_groups(mode):
    # fairchem's exchange takes a rank's number in its group for that in the world, where that is Gloo.
    sides = BOTH if mode == "allgather" else ("alone",)
    run_ranks(4, trained, mode, 2, 10, sides, backend="gloo", limit=120)


@pytest.mark.parametrize("mode", ["allgather", "all_to_all"])
def test_training_on_shm(mode):
    run_ranks(3, trained, mode, 3, 10, ("alone",), limit=120)
