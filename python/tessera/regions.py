"""Differentiable operators between placements, in conjugate pairs.

A value is split over the ranks of a group in one of four ways: `Shard` (a slice), `Replicated` (the
whole, and the whole gradient), `Shared` (the whole, but the ranks' gradients add up) and `Partial` (an
addend). The backward of every operator is a call to its partner, so derivatives of any order are right.

=================  =============================  ==================
operator           from, to                       backward
=================  =============================  ==================
``copy``           Replicated, Shared             ``reduce``
``reduce``         Partial, Replicated            ``copy``
``gather``         Shard, Replicated              ``scatter``
``scatter``        Replicated, Shard              ``gather``
``gather_shared``  Shard, Shared                  ``reduce_scatter``
``reduce_scatter`` Partial, Shard                 ``gather_shared``
``all_reduce``     Partial, Shared                ``all_reduce``
=================  =============================  ==================

All ranks of the group call an operator, with the same `dim`, `sizes`, type and trailing shape. They
compare them with one small message, and agree on whether the result needs a gradient; a difference is
the same CommError on all ranks. Nothing modifies its input or the gradient that arrives. `group` None is
the world group.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C
from tessera.comm._group import group_or_world

__all__ = [
    "all_reduce",
    "copy",
    "even_sizes",
    "gather",
    "gather_shared",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def copy(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return `x` for use in work that differs between ranks; their gradients are added up."""
    return _C.regions.copy(x, group_or_world(group))


def reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum of all ranks' `x`; each gets the gradient of the sum."""
    return _C.regions.reduce(x, group_or_world(group))


def all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum of all ranks' `x` for use in work that differs between ranks."""
    return _C.regions.all_reduce(x, group_or_world(group))


def gather(
    x: Tensor, group: ProcessGroup | None = None, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Join the ranks' slices along `dim`; each gets its slice of the gradient.

    Right only if all ranks do the same with the result; see gather_shared. Slices may differ in size and
    may be empty. Without `sizes` the ranks tell each other.
    """
    return _C.regions.gather(x, group_or_world(group), dim, sizes)


def scatter(
    x: Tensor, group: ProcessGroup | None = None, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's slice of `x` along `dim`; the ranks' gradients are joined.

    Without `sizes`, the slices differ by at most one and the first ranks have the larger ones.
    """
    return _C.regions.scatter(x, group_or_world(group), dim, sizes)


def gather_shared(
    x: Tensor, group: ProcessGroup | None = None, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Join the ranks' slices along `dim`; each gets its slice of the sum of all gradients.

    This is what message passing over a split graph needs.
    """
    return _C.regions.gather_shared(x, group_or_world(group), dim, sizes)


def reduce_scatter(
    x: Tensor, group: ProcessGroup | None = None, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return this rank's slice of the sum of all ranks' `x`; the ranks' gradients are joined."""
    return _C.regions.reduce_scatter(x, group_or_world(group), dim, sizes)


def even_sizes(extent: int, num_parts: int) -> list[int]:
    """Cut `extent` into sizes that differ by at most one, the larger ones first.

    >>> even_sizes(10, 4)
    [3, 3, 2, 2]
    """
    return _C.regions.even_sizes(extent, num_parts)
