"""Collectives that return their result, with uneven sizes where torch.distributed has none.

All ranks of the group call them, in the same order. Inputs are left untouched unless the name ends in
an underscore. "Rows" are slices along the first dimension. Tensors may be empty and non-contiguous.
Not differentiable. An ``_async`` twin returns an Awaitable at once; until it is waited for, its input
must not be written.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from tessera import _C
from tessera.comm._awaitable import Awaitable
from tessera.comm._group import group_or_world

_SUM = ReduceOp.SUM


class _TensorAwaitable(Awaitable[Tensor]):
    def __init__(self, pending: _C.Pending):
        super().__init__()
        self._pending = pending

    def _wait_impl(self) -> Tensor:
        return self._pending.wait()


def all_reduce(input: Tensor, group: ProcessGroup | None = None, op: ReduceOp.RedOpType = _SUM) -> Tensor:
    """Return the tensors of all ranks reduced, in rank order, on every rank."""
    return _C.all_reduce(input, group_or_world(group), op)


def all_reduce_async(
    input: Tensor, group: ProcessGroup | None = None, op: ReduceOp.RedOpType = _SUM
) -> Awaitable[Tensor]:
    """Start all_reduce and return its result to come."""
    return _TensorAwaitable(_C.all_reduce_async(input, group_or_world(group), op))


def all_reduce_(tensor: Tensor, group: ProcessGroup | None = None, op: ReduceOp.RedOpType = _SUM) -> Tensor:
    """Overwrite `tensor` with the reduction over all ranks and return it."""
    return _C.all_reduce_(tensor, group_or_world(group), op)


def reduce(
    input: Tensor,
    root: int,
    group: ProcessGroup | None = None,
    op: ReduceOp.RedOpType = _SUM,
) -> Tensor:
    """Return the reduction on group rank `root`; other ranks get back their input."""
    return _C.reduce(input, root, group_or_world(group), op)


def broadcast_(tensor: Tensor, root: int, group: ProcessGroup | None = None) -> Tensor:
    """Overwrite `tensor` with group rank `root`'s and return it."""
    return _C.broadcast_(tensor, root, group_or_world(group))


def all_gather(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Stack the rows of all ranks in rank order. All inputs have the same shape."""
    return _C.all_gather(input, group_or_world(group))


def all_gather_async(input: Tensor, group: ProcessGroup | None = None) -> Awaitable[Tensor]:
    """Start all_gather and return its result to come."""
    return _TensorAwaitable(_C.all_gather_async(input, group_or_world(group)))


def all_gather_v(
    input: Tensor, group: ProcessGroup | None = None, rows: Sequence[int] | None = None
) -> Tensor:
    """Stack the rows of all ranks in rank order; their number may differ.

    `rows[r]` is rank r's number of rows; without it, one more small message learns them.

    >>> import tessera, torch, torch.distributed as dist
    >>> world = tessera.comm.init()
    >>> all_gather_v(torch.arange(3))
    tensor([0, 1, 2])
    >>> dist.destroy_process_group()
    """
    return _C.all_gather_v(input, group_or_world(group), rows)


def all_gather_v_async(
    input: Tensor, group: ProcessGroup | None = None, rows: Sequence[int] | None = None
) -> Awaitable[Tensor]:
    """Start all_gather_v and return its result to come."""
    return _TensorAwaitable(_C.all_gather_v_async(input, group_or_world(group), rows))


def reduce_scatter(input: Tensor, group: ProcessGroup | None = None, op: ReduceOp.RedOpType = _SUM) -> Tensor:
    """Cut the rows evenly over the ranks and return this rank's part, reduced over all ranks."""
    return _C.reduce_scatter(input, group_or_world(group), op)


def reduce_scatter_async(
    input: Tensor, group: ProcessGroup | None = None, op: ReduceOp.RedOpType = _SUM
) -> Awaitable[Tensor]:
    """Start reduce_scatter and return its result to come."""
    return _TensorAwaitable(_C.reduce_scatter_async(input, group_or_world(group), op))


def reduce_scatter_v(
    input: Tensor,
    rows: Sequence[int],
    group: ProcessGroup | None = None,
    op: ReduceOp.RedOpType = _SUM,
) -> Tensor:
    """Reduce and return this rank's part: `rows[r]` rows belong to rank r."""
    return _C.reduce_scatter_v(input, rows, group_or_world(group), op)


def reduce_scatter_v_async(
    input: Tensor,
    rows: Sequence[int],
    group: ProcessGroup | None = None,
    op: ReduceOp.RedOpType = _SUM,
) -> Awaitable[Tensor]:
    """Start reduce_scatter_v and return its result to come."""
    return _TensorAwaitable(_C.reduce_scatter_v_async(input, rows, group_or_world(group), op))


def all_to_all(input: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Cut the rows evenly, send part r to rank r, and stack what arrives in rank order."""
    return _C.all_to_all(input, group_or_world(group))


def all_to_all_async(input: Tensor, group: ProcessGroup | None = None) -> Awaitable[Tensor]:
    """Start all_to_all and return its result to come."""
    return _TensorAwaitable(_C.all_to_all_async(input, group_or_world(group)))


def all_to_all_v(
    input: Tensor,
    send_rows: Sequence[int],
    group: ProcessGroup | None = None,
    recv_rows: Sequence[int] | None = None,
) -> Tensor:
    """Send `send_rows[r]` rows to rank r and stack what arrives in rank order.

    `recv_rows[r]` rows come from rank r; without it, one more small message learns them.
    """
    return _C.all_to_all_v(input, send_rows, group_or_world(group), recv_rows)


def all_to_all_v_async(
    input: Tensor,
    send_rows: Sequence[int],
    group: ProcessGroup | None = None,
    recv_rows: Sequence[int] | None = None,
) -> Awaitable[Tensor]:
    """Start all_to_all_v and return its result to come."""
    return _TensorAwaitable(_C.all_to_all_v_async(input, send_rows, group_or_world(group), recv_rows))


def gather(
    input: Tensor,
    root: int,
    group: ProcessGroup | None = None,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Stack the rows of all ranks on group rank `root`; other ranks get an empty tensor."""
    return _C.gather(input, root, group_or_world(group), rows)


def scatter(input: Tensor, rows: Sequence[int], root: int, group: ProcessGroup | None = None) -> Tensor:
    """Cut group rank `root`'s rows into `rows[r]` for rank r and return this rank's part.

    Every rank gives `rows` and an `input` of the same trailing shape and type; only the root's
    values are read.
    """
    return _C.scatter(input, rows, root, group_or_world(group))


def barrier(group: ProcessGroup | None = None) -> None:
    """Return when all ranks have called it."""
    _C.barrier(group_or_world(group))
