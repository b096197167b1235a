"""Work that one rank does for all."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from tessera import _C
from tessera._error import CommError

T = TypeVar("T")


def is_leader(pg: ProcessGroup | None, leader_rank: int = 0) -> bool:
    """Tell whether this process is rank `leader_rank` of the group. Not collective.

    Without a group the process is alone, and leads.

    >>> is_leader(None)
    True
    """
    return pg is None or pg.rank() == leader_rank


def invoke_on_rank_and_broadcast_result(
    pg: ProcessGroup, rank: int, func: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Call `func` on group rank `rank` and return its result on every rank of the group.

    Collective. The result crosses by pickle. An exception of `func` is raised where it happened as
    itself, and on the other ranks as CommError of kind "peer failed" with its text; nobody is left
    waiting, and the group stays usable.

    >>> import tessera, torch.distributed as dist
    >>> invoke_on_rank_and_broadcast_result(tessera.comm.init(), 0, max, 3, 7)
    7
    >>> dist.destroy_process_group()
    """
    result, failure, message = None, None, b""
    if pg.rank() == rank:
        try:
            result = func(*args, **kwargs)
            message = b"R" + pickle.dumps(result)
        except BaseException as error:
            failure = error
            message = b"E" + f"{type(error).__name__}: {error}".encode()
    message = _C.broadcast_bytes(message, rank, pg)
    if failure is not None:
        raise failure
    if message[:1] == b"E":
        raise CommError(
            f"comm.invoke_on_rank: rank {_C.world_rank(pg, rank)} raised {message[1:].decode()}",
            "peer failed",
            [rank],
        )
    return result if pg.rank() == rank else pickle.loads(message[1:])


def run_on_leader(pg: ProcessGroup, rank: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Make a function run on group rank `rank` only and return its result on every rank.

    Calling the decorated function is collective; see invoke_on_rank_and_broadcast_result.

    >>> import tessera, torch.distributed as dist
    >>> world = tessera.comm.init()
    >>> @run_on_leader(world, 0)
    ... def allocate_id():
    ...     return 42
    >>> allocate_id()
    42
    >>> dist.destroy_process_group()
    """

    def decorate(func: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> T:
            return invoke_on_rank_and_broadcast_result(pg, rank, func, *args, **kwargs)

        return wrapper

    return decorate
