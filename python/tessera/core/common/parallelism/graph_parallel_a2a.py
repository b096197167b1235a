"""Rows of other ranks, only those needed: ``fairchem.core.common.parallelism.graph_parallel_a2a``.

A `GPContext` is a `tessera.graph_parallel.HaloPlan` by fairchem's names; `all_to_all_collect` is
`halo_exchange`, which is differentiable any number of times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.core.common import gp_utils
from tessera.core.common.parallelism.graph_partition import (
    PartitionStrategy,
    partition_atoms_index_split,
    partition_atoms_spatial,
)
from tessera.graph_parallel import HaloPlan, Partition, halo_exchange

__all__ = [
    "GPContext",
    "PartitionStrategy",
    "all_to_all_collect",
    "build_gp_context",
    "compute_a2a_partition",
    "partition_atoms_index_split",
    "partition_atoms_spatial",
]


@dataclass
class GPContext:
    """Say which rows travel between which ranks, and where edges find them.

    Rows in local numbers are those of this rank's atoms, in order, then those received, by owner and atom.
    """

    rank: int
    world_size: int
    total_local_atoms: int
    send_indices: Tensor  # own rows, by the rank that they go to
    send_counts: Tensor
    recv_counts: Tensor
    edge_index_local: Tensor
    send_splits: list[int]
    recv_splits: list[int]
    total_recv: int
    local_edge_idx: Tensor  # positions of the edges whose source is an own row
    remote_edge_idx: Tensor
    rank_assignments: Tensor
    plan: HaloPlan | None = None  # what all_to_all_collect goes by; None on one rank


def compute_a2a_partition(
    pos: Tensor,
    total_atoms: int,
    device: torch.device | str,
    world_size: int,
    rank: int,
    strategy: PartitionStrategy,
) -> tuple[Tensor, Tensor]:
    """Return the owner of each atom, and this rank's atoms.

    >>> owners, mine = compute_a2a_partition(torch.zeros(3, 3), 3, "cpu", 2, 1, PartitionStrategy.INDEX_SPLIT)
    >>> owners.tolist(), mine.tolist()
    ([0, 0, 1], [2])
    """
    if strategy == PartitionStrategy.SPATIAL:
        owners = partition_atoms_spatial(pos, world_size)
    else:
        owners = partition_atoms_index_split(total_atoms, world_size, device)
    return owners, (owners == rank).nonzero(as_tuple=True)[0]


@torch.compiler.disable
def build_gp_context(
    edge_index: Tensor,
    rank_assignments: Tensor,
    rank: int,
    world_size: int,
    node_partition: Tensor | None = None,
) -> GPContext:
    """Find which rows travel for the edges whose targets this rank owns. Collective.

    `edge_index` [2, edges] holds sources and targets by their numbers in the whole graph. `rank`,
    `world_size` and `node_partition` are this rank's place in the graph-parallel group, its size and this
    rank's atoms, in order; another place, size or order is a ValueError.
    """
    given = (rank, world_size)
    known = (gp_utils.get_gp_rank(), gp_utils.get_gp_world_size())
    if given != known:
        raise ValueError(
            f"graph.build_gp_context: rank {rank} of {world_size} is rank {known[0]} of {known[1]} of the "
            "graph-parallel group. Call setup_graph_parallel_groups() first, and pass its numbers."
        )
    mine = (rank_assignments == rank).nonzero(as_tuple=True)[0]
    if node_partition is not None and not torch.equal(node_partition, mine):
        raise ValueError(
            "graph.build_gp_context: node_partition is not what rank_assignments gives this rank, in order."
        )
    device = edge_index.device
    if world_size == 1:
        edges = torch.arange(edge_index.size(1), device=device)
        none = torch.zeros(1, dtype=torch.long, device=device)
        return GPContext(
            rank, 1, mine.numel(), none[:0], none, none.clone(), edge_index, [0], [0], 0, edges, edges[:0],
            rank_assignments,
        )  # fmt: skip
    partition = Partition.from_owners(rank_assignments.cpu(), world_size)
    plan = HaloPlan(partition, edge_index.cpu(), gp_utils.get_gp_group())
    sent, received = list(plan.send_rows), list(plan.recv_rows)
    return GPContext(
        rank=rank,
        world_size=world_size,
        total_local_atoms=plan.num_owned,
        send_indices=plan.send_index.to(device),
        send_counts=torch.tensor(sent, device=device),
        recv_counts=torch.tensor(received, device=device),
        edge_index_local=plan.local_edges.to(device),
        send_splits=sent,
        recv_splits=received,
        total_recv=plan.num_halo,
        local_edge_idx=plan.interior.to(device),
        remote_edge_idx=plan.boundary.to(device),
        rank_assignments=rank_assignments,
        plan=plan,
    )


def all_to_all_collect(x_local: Tensor, gp_ctx: GPContext) -> Tensor:
    """Return the rows of other ranks that this rank's edges need, [total_recv, ...]. Collective.

    Joined behind `x_local` they are what `edge_index_local` counts. Differentiable any number of times.
    """
    return x_local[:0] if gp_ctx.plan is None else halo_exchange(x_local, gp_ctx.plan)
