"""Groups, meshes, collectives and failure reports over torch's process groups.

Every function that takes a group takes an ordinary ``torch.distributed`` group, and the world when
none is given.
"""

from tessera._C import Environment, read_environment
from tessera.comm._awaitable import Awaitable, LazyAwaitable, LazyNoWait, NoWait
from tessera.comm._collectives import (
    all_gather,
    all_gather_async,
    all_gather_v,
    all_gather_v_async,
    all_reduce,
    all_reduce_,
    all_reduce_async,
    all_to_all,
    all_to_all_async,
    all_to_all_v,
    all_to_all_v_async,
    barrier,
    broadcast_,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_async,
    reduce_scatter_v,
    reduce_scatter_v_async,
    scatter,
)
from tessera.comm._failure import guard, report_failure, set_step
from tessera.comm._group import abort, engine, init
from tessera.comm._mesh import Mesh

__all__ = [
    "Awaitable",
    "Environment",
    "LazyAwaitable",
    "LazyNoWait",
    "Mesh",
    "NoWait",
    "abort",
    "all_gather",
    "all_gather_async",
    "all_gather_v",
    "all_gather_v_async",
    "all_reduce",
    "all_reduce_",
    "all_reduce_async",
    "all_to_all",
    "all_to_all_async",
    "all_to_all_v",
    "all_to_all_v_async",
    "barrier",
    "broadcast_",
    "engine",
    "gather",
    "guard",
    "init",
    "read_environment",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_async",
    "reduce_scatter_v",
    "reduce_scatter_v_async",
    "report_failure",
    "scatter",
    "set_step",
]
