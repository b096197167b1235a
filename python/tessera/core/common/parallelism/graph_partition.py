"""Owners of atoms, by the names of ``fairchem.core.common.parallelism.graph_partition``."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.core.common.gp_utils import GPPartition
from tessera.graph_parallel import Partition

__all__ = ["PartitionStrategy", "partition_atoms_index_split", "partition_atoms_spatial"]

PartitionStrategy = GPPartition


def partition_atoms_spatial(pos: Tensor, num_ranks: int, num_iters: int = 10) -> Tensor:
    """Return the owner of each atom, from a Morton curve through their places, [atoms, 3].

    Parts differ by at most one atom. `num_iters` has no effect. `tessera.graph_parallel.Partition` knows
    others, with smaller boundaries.

    >>> partition_atoms_spatial(torch.tensor([[0.0, 0, 0], [9, 9, 9], [1, 0, 0], [9, 9, 8]]), 2).tolist()
    [0, 1, 0, 1]
    """
    return Partition.morton(pos.detach(), num_ranks).owners.to(pos.device)


def partition_atoms_index_split(total_atoms: int, num_ranks: int, device: torch.device | str) -> Tensor:
    """Return the owner of each atom: consecutive ones, the larger parts first.

    >>> partition_atoms_index_split(5, 2, "cpu").tolist()
    [0, 0, 0, 1, 1]
    """
    return Partition.contiguous(total_atoms, num_ranks).owners.to(device)
