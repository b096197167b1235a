"""One graph over many ranks: who owns which node, and which rows travel.

A `Partition` gives every node an owner and is the one source of sizes, offsets and orders. A `HaloPlan`
is built once per graph; every layer then exchanges the rows on the boundary and nothing else. The halo
operators are differentiable any number of times.

>>> import torch
>>> parts = Partition.contiguous(10, 4)
>>> parts.sizes
[3, 3, 2, 2]
>>> parts.owner_of(torch.tensor([0, 4, 9])).tolist()
[0, 1, 3]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C
from tessera.comm._group import group_or_world

__all__ = [
    "Adjacency",
    "HaloPlan",
    "Partition",
    "PendingRows",
    "edges_of_part",
    "halo_accumulate",
    "halo_accumulate_async",
    "halo_exchange",
    "halo_exchange_async",
    "halo_extend",
    "neighbour_sum",
]

_engine = _C.graph_parallel
Adjacency = _engine.Adjacency
PendingRows = _engine.PendingRows


class Partition:
    """Hold an owner for every node, and the order in which an owner keeps its nodes.

    Make one with `contiguous`, `from_owners`, `morton`, `hilbert`, `recursive_bisection` or `metis`; every
    rank makes the same one from the same input. Read `sizes`, `offsets`, `owners`, `permutation` (the
    nodes, part after part), `inverse`, `num_nodes` and `num_parts`.
    """

    def __init__(self, handle: _engine.Partition):
        self._handle = handle

    def __getattr__(self, name: str):
        return getattr(self._handle, name)

    def __repr__(self) -> str:
        return repr(self._handle)

    @classmethod
    def contiguous(cls, nodes: int | Sequence[int], num_parts: int | None = None) -> Partition:
        """Give consecutive nodes to each part: so many nodes in so many parts, or the sizes given."""
        if num_parts is None:
            return cls(_engine.Partition.contiguous_sizes(list(nodes)))
        return cls(_engine.Partition.contiguous(nodes, num_parts))

    @classmethod
    def from_owners(cls, owners: Tensor, num_parts: int) -> Partition:
        """Take the owner of each node from a table."""
        return cls(_engine.Partition.from_owners(owners, num_parts))

    @classmethod
    def morton(
        cls, positions, num_parts, cell=None, is_periodic=(True, True, True), weights=None
    ) -> Partition:
        """Cut a Morton curve through `positions`, [nodes, 3]; `cell` has lattice vectors as rows."""
        return cls(_engine.Partition.morton(positions, num_parts, cell, is_periodic, weights))

    @classmethod
    def hilbert(
        cls, positions, num_parts, cell=None, is_periodic=(True, True, True), weights=None
    ) -> Partition:
        """Cut a Hilbert curve through `positions`."""
        return cls(_engine.Partition.hilbert(positions, num_parts, cell, is_periodic, weights))

    @classmethod
    def recursive_bisection(
        cls, positions, num_parts, cell=None, is_periodic=(True, True, True), weights=None
    ) -> Partition:
        """Halve the nodes again and again, across the axis whose cut exposes the least area."""
        return cls(_engine.Partition.recursive_bisection(positions, num_parts, cell, is_periodic, weights))

    @classmethod
    def metis(
        cls, num_nodes: int, edge_index: Tensor, num_parts: int, weights: Tensor | None = None
    ) -> Partition:
        """Ask METIS for few cut edges; ValueError if this build has none."""
        return cls(_engine.Partition.metis(num_nodes, edge_index, num_parts, weights))

    @staticmethod
    def has_metis() -> bool:
        """Return whether this build has METIS."""
        return _engine.Partition.has_metis()


class HaloPlan:
    """Know who sends which rows to whom, for the edges whose targets this rank owns.

    Collective. `edge_index` holds sources and targets in global ids. With `is_symmetric` (every edge has
    its mirror image) no ids are exchanged. `payload` is the type in which rows travel.

    Local numbering: owned rows first, in the order of ``partition.nodes_of(rank)``, then halo rows by
    owner and global id. Read `num_owned`, `num_halo`, `nodes`, `local_edges`, `interior`, `boundary`.
    """

    def __init__(
        self,
        partition: Partition,
        edge_index: Tensor,
        group: ProcessGroup | None = None,
        *,
        is_symmetric: bool = False,
        check: bool = True,
        payload: torch.dtype | None = None,
        deterministic: bool = False,
    ):
        self.partition = partition
        self.group = group_or_world(group)
        self._handle = _engine.HaloPlan(
            partition._handle, edge_index, self.group, is_symmetric, check, payload, deterministic
        )

    def __getattr__(self, name: str):
        return getattr(self._handle, name)


def edges_of_part(edge_index: Tensor, partition: Partition, part: int) -> Tensor:
    """Return the positions of the edges whose targets `part` owns."""
    return _engine.edges_of_part(edge_index, partition._handle, part)


def halo_exchange(owned: Tensor, plan: HaloPlan) -> Tensor:
    """Return the halo rows, [num_halo, ...], of `owned`, [num_owned, ...]. Shard to Shared."""
    return _engine.halo_exchange(owned, plan._handle)


def halo_accumulate(halo: Tensor, plan: HaloPlan) -> Tensor:
    """Add up halo rows at their owners: [num_owned, ...]. Partial to Shard."""
    return _engine.halo_accumulate(halo, plan._handle)


def halo_extend(owned: Tensor, plan: HaloPlan) -> Tensor:
    """Return owned and halo rows in local numbering."""
    return _engine.halo_extend(owned, plan._handle)


def halo_exchange_async(owned: Tensor, plan: HaloPlan) -> PendingRows:
    """Start halo_exchange; compute what needs no halo, then call `finish()` on the result."""
    return _engine.halo_exchange_async(owned, plan._handle)


def halo_accumulate_async(halo: Tensor, plan: HaloPlan) -> PendingRows:
    """Start halo_accumulate; call `finish()` on the result."""
    return _engine.halo_accumulate_async(halo, plan._handle)


def neighbour_sum(rows: Tensor, adjacency: Adjacency, weights: Tensor | None = None) -> Tensor:
    """Return, for each target, the sum over its edges of the source's row times the edge's weight.

    `weights` is [edges, columns], [edges, 1] or None. One pass, without a tensor of messages;
    differentiable any number of times in rows and weights.

    >>> edges = torch.tensor([[0, 1, 2], [0, 0, 1]])
    >>> neighbour_sum(torch.eye(3), Adjacency(edges, 3, 2))
    tensor([[1., 1., 0.],
            [0., 0., 1.]])
    """
    return _engine.neighbour_sum(rows, adjacency, weights)
