"""Times one layer over a split graph, forward and backward: Tessera's halo beside fairchem's own gather.

The peer is fairchem's file gp_utils.py, loaded from a wheel that lies under .venv-peers (see README.md)
or from the path given; without it nothing is measured. Two ranks, 65536 nodes of a periodic lattice with
their 20 nearest neighbours, 128 features. Both layers select, multiply and add; what differs is how rows
of the other rank arrive, and Tessera's one-pass sum. Prints one line of JSON per row.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import time

from rank_page import Page, print_row, rank_parser, start_ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIDES = (64, 32, 32)
FEATURES = 128
REPETITIONS = 7
WARM_UPS = 2


def find_peer() -> str:
    found = sorted(ROOT.glob(".venv-peers/**/fairchem/core/common/gp_utils.py"))
    return str(found[0]) if found else ""


def lattice(torch):
    """Edges from the 20 nearest places to every node: 6 faces, 12 edges, 2 of the next shell."""
    offsets = sorted(
        (
            (dx * dx + dy * dy + dz * dz, dx, dy, dz)
            for dx in range(-2, 3)
            for dy in range(-2, 3)
            for dz in range(-2, 3)
            if (dx, dy, dz) != (0, 0, 0)
        ),
        key=lambda one: (one[0], abs(one[1]), abs(one[2]), one),
    )[:20]
    grid = torch.stack(torch.meshgrid(*(torch.arange(side) for side in SIDES), indexing="ij"), -1).view(-1, 3)
    strides = torch.tensor([SIDES[1] * SIDES[2], SIDES[2], 1])
    sides = torch.tensor(SIDES)
    sources = [((grid + torch.tensor(offset[1:])) % sides * strides).sum(1) for offset in offsets]
    targets = torch.arange(grid.shape[0]).repeat(len(offsets))
    return torch.stack([torch.cat(sources), targets])


def run_rank(path: str, rank: int, size: int, peer_path: str) -> None:
    import torch
    import torch.distributed as dist
    from tessera import graph_parallel as graph

    torch.set_num_threads(1)
    page = Page(path, rank, size)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    shm = dist.new_group(backend="shm")
    spec = importlib.util.spec_from_file_location("peer", peer_path)
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    peer.setup_gp({"gp_gpus": size, "distributed_backend": "gloo"})

    edges = lattice(torch)
    num_nodes = int(torch.tensor(SIDES).prod())
    share = num_nodes // size
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(edges.shape[1], 1, generator=generator)
    whole = torch.randn(num_nodes, FEATURES, generator=generator)
    upstream = torch.randn(num_nodes, FEATURES, generator=generator)[rank * share : (rank + 1) * share]
    own = whole[rank * share : (rank + 1) * share].clone().requires_grad_(True)

    partition = graph.Partition.contiguous(num_nodes, size)
    mine = graph.edges_of_part(edges, partition, rank)
    local, local_weights = edges[:, mine], weights[mine]
    plan = graph.HaloPlan(partition, local, shm)
    adjacency = graph.Adjacency(plan.local_edges, plan.num_owned + plan.num_halo, plan.num_owned)

    def gathered(function):
        rows = function(own, 0)
        messages = rows[local[0]] * local_weights
        return torch.zeros(share, FEATURES).index_add(0, local[1] - rank * share, messages)

    ways = {
        "tessera_shm": lambda: graph.neighbour_sum(graph.halo_extend(own, plan), adjacency, local_weights),
        "fairchem_gather": lambda: gathered(peer.gather_from_model_parallel_region),
        "fairchem_gather_sum": lambda: gathered(peer.gather_from_model_parallel_region_sum_grad),
    }
    expected = torch.zeros(num_nodes, FEATURES).index_add(0, edges[1], whole[edges[0]] * weights)
    for name, way in ways.items():
        torch.testing.assert_close(
            way().detach(), expected[rank * share : (rank + 1) * share], rtol=1e-4, atol=1e-4
        )
        times = []
        for i in range(WARM_UPS + REPETITIONS):
            page.meet()
            begin = time.perf_counter()
            torch.autograd.grad(way(), own, upstream)
            slowest = page.slowest((time.perf_counter() - begin) * 1e6)
            if i >= WARM_UPS:
                times.append(slowest)
        if rank == 0:
            row = f"graph/python_layer/{name}/n{num_nodes}_c{FEATURES}_p{size}"
            print_row(row, size, own.numel() * 4, times)
    page.meet()
    dist.destroy_process_group()


def main() -> int:
    parser = rank_parser(__doc__)
    parser.add_argument("--peer", default=find_peer(), help="fairchem's gp_utils.py")
    words = parser.parse_args()
    if not words.peer:
        print("graph_gather: no fairchem under .venv-peers; nothing is measured", file=sys.stderr)
        return 0
    if words.as_rank is not None:
        run_rank(words.page, words.as_rank, 2, words.peer)
        return 0
    return start_ranks(2, "--peer", words.peer)


if __name__ == "__main__":
    sys.exit(main())
