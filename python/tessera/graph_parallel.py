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
_EVERY_AXIS = (True, True, True)


def _field(name: str, doc: str) -> property:
    return property(lambda self: getattr(self._handle, name), doc=doc)


class Partition:
    """Hold an owner for every node, and the order in which an owner keeps its nodes.

    Make one with `contiguous`, `from_owners`, `morton`, `hilbert`, `recursive_bisection` or `metis`; every
    rank makes the same one from the same input. Read `sizes`, `offsets`, `owners`, `permutation` (the
    nodes, part after part), `inverse`, `num_nodes` and `num_parts`.
    """

    def __init__(self, handle: _engine.Partition):
        self._handle = handle

    num_nodes = _field("num_nodes", "Number of nodes of the whole graph.")
    num_parts = _field("num_parts", "Number of owners.")
    is_contiguous = _field("is_contiguous", "Whether each part has consecutive nodes, in order.")
    sizes = _field("sizes", "Number of nodes of each part.")
    offsets = _field("offsets", "Where each part begins in `permutation`; one more at the end.")
    owners = _field("owners", "Owner of each node.")
    permutation = _field("permutation", "The nodes, part after part.")
    inverse = _field("inverse", "Where each node is in `permutation`.")

    def nodes_of(self, part: int) -> Tensor:
        """Return the nodes of `part`, in the order in which it keeps them."""
        return self._handle.nodes_of(part)

    def owner_of(self, nodes: Tensor) -> Tensor:
        """Return the owners of `nodes`, in the same shape."""
        return self._handle.owner_of(nodes)

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
    def morton(cls, positions, num_parts, cell=None, is_periodic=_EVERY_AXIS, weights=None) -> Partition:
        """Cut a Morton curve through `positions`, [nodes, 3]; `cell` has lattice vectors as rows."""
        return cls(_engine.Partition.morton(positions, num_parts, cell, is_periodic, weights))

    @classmethod
    def hilbert(cls, positions, num_parts, cell=None, is_periodic=_EVERY_AXIS, weights=None) -> Partition:
        """Cut a Hilbert curve through `positions`."""
        return cls(_engine.Partition.hilbert(positions, num_parts, cell, is_periodic, weights))

    @classmethod
    def recursive_bisection(
        cls, positions, num_parts, cell=None, is_periodic=_EVERY_AXIS, weights=None
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

    num_owned = _field("num_owned", "Number of rows this rank owns.")
    num_halo = _field("num_halo", "Number of rows this rank receives.")
    num_local = _field("num_local", "Number of both.")
    num_sent = _field("num_sent", "Number of rows this rank sends; one for two ranks counts twice.")
    nodes = _field("nodes", "Global id of each local row.")
    halo_nodes = _field("halo_nodes", "Global id of each halo row.")
    send_index = _field("send_index", "Local row of each row sent.")
    send_rows = _field("send_rows", "Number of rows sent to each rank.")
    recv_rows = _field("recv_rows", "Number of rows received from each rank.")
    local_edges = _field("local_edges", "The edges in local numbering, in the order given.")
    interior = _field("interior", "Positions of the edges that need no halo row.")
    boundary = _field("boundary", "Positions of the edges that do.")

    def verify(self) -> None:
        """Compare with the other ranks who sends what to whom; raise if they differ. Collective."""
        self._handle.verify()


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
