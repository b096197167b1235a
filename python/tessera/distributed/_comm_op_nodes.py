"""The exchanges of comm_ops taken apart: what starts one, what waits for it, and what both know.

    request = Request(group, device)
    token = All2All_Pooled_Req.apply(group, request, info, pooled)
    ...                                            # computes beside the exchange
    result = All2All_Pooled_Wait.apply(group, request, token)

Both are nodes of autograd, in C++: backward, the second starts the reverse exchange and the first waits
for it. The token is there for the signature's sake; the request connects the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera.distributed.types import Awaitable, QuantizedCommCodecs

W = TypeVar("W")


@dataclass
class All2AllPooledInfo:
    """Say how pooled rows are cut: samples of every rank, columns of every rank."""

    batch_size_per_rank: list[int]
    dim_sum_per_rank: list[int]
    dim_sum_per_rank_tensor: Tensor | None
    cumsum_dim_sum_per_rank_tensor: Tensor | None
    codecs: QuantizedCommCodecs | None = None


@dataclass
class VariableBatchAll2AllPooledInfo:
    """Say how flat pooled rows are cut, with a batch for every rank and feature."""

    batch_size_per_rank_per_feature: list[list[int]]
    batch_size_per_feature_pre_a2a: list[int]
    emb_dim_per_rank_per_feature: list[list[int]]
    codecs: QuantizedCommCodecs | None = None
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None


@dataclass
class All2AllSequenceInfo:
    """Say how rows of single ids go back: the splits are those of the ids."""

    embedding_dim: int
    lengths_after_sparse_data_all2all: Tensor
    forward_recat_tensor: Tensor | None
    backward_recat_tensor: Tensor
    input_splits: list[int]
    output_splits: list[int]
    variable_batch_size: bool = False
    codecs: QuantizedCommCodecs | None = None
    permuted_lengths_after_sparse_data_all2all: Tensor | None = None


@dataclass
class All2AllVInfo:
    """Say how samples are cut over the ranks: columns of every rank, samples of every rank."""

    dims_sum_per_rank: list[int]
    B_global: int
    B_local: int
    B_local_list: list[int]
    D_local_list: list[int]
    input_split_sizes: list[int] = field(default_factory=list)
    output_split_sizes: list[int] = field(default_factory=list)
    codecs: QuantizedCommCodecs | None = None


@dataclass
class All2AllDenseInfo:
    """Hold the sizes of a dense exchange; no operator of this module reads it."""

    output_splits: list[int]
    batch_size: int
    input_shape: list[int]
    input_splits: list[int]


@dataclass
class ReduceScatterInfo:
    """Hold the shapes of the parts that are summed."""

    input_sizes: list[torch.Size]
    codecs: QuantizedCommCodecs | None = None


@dataclass
class ReduceScatterBaseInfo:
    """Hold the shape of what is summed and cut evenly."""

    input_sizes: torch.Size
    codecs: QuantizedCommCodecs | None = None


@dataclass
class ReduceScatterVInfo:
    """Say how many rows of the sum every rank gets."""

    input_sizes: list[torch.Size]
    input_splits: list[int]
    equal_splits: bool
    total_input_size: list[int]
    codecs: QuantizedCommCodecs | None


@dataclass
class AllGatherBaseInfo:
    """Hold the shape of what every rank gives."""

    input_size: torch.Size
    codecs: QuantizedCommCodecs | None = None


class Request(Awaitable[W]):
    """Hold an exchange under way, from its `…_Req` to its `…_Wait`."""

    def __init__(self, pg: ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.pg = pg
        self.device = device
        self.wait_function: type[_Wait] | None = None
        self.dummy_tensor = torch.empty(1, requires_grad=True, device=device)
        self._pending: Awaitable[Any] | None = None

    def _wait_impl(self) -> W:
        if self._pending is None:
            raise RuntimeError("comm_ops.Request: nothing was started; call the …_Req of an exchange first.")
        return self._pending.wait()


class _Req:
    """Start an exchange. All ranks of the group call it, in the same order."""

    _start: Callable[..., Awaitable[Any]]
    _wait: type[_Wait]

    @classmethod
    def apply(cls, pg: ProcessGroup, myreq: Request, info: Any, *inputs: Tensor) -> Tensor:
        """Start on `inputs` and return a token for the `…_Wait`."""
        if myreq._pending is not None:
            raise RuntimeError("comm_ops.Request: it holds an exchange already; make one for each.")
        myreq._pending = cls._start(pg, info, *inputs)
        myreq.wait_function = cls._wait
        return myreq.dummy_tensor


class _Wait:
    """Wait for an exchange."""

    @classmethod
    def apply(cls, pg: ProcessGroup, myreq: Request, *dummy_tensor: Tensor) -> Any:
        """Return what the exchange of `myreq` gives, part of the graph of autograd."""
        if myreq.wait_function is not None and myreq.wait_function is not cls:
            raise RuntimeError(
                f"comm_ops: {cls.__name__} waits for an exchange that {myreq.wait_function.__name__} ends."
            )
        return myreq.wait()


def make_pair(
    names: tuple[str, str], start: Callable[..., Awaitable[Any]], module: str
) -> tuple[type[_Req], type[_Wait]]:
    """Return the two classes of an exchange; `start(pg, info, *inputs)` begins it."""
    wait = type(names[1], (_Wait,), {"__module__": module, "__doc__": _Wait.__doc__})
    namespace = {"__module__": module, "__doc__": _Req.__doc__, "_start": staticmethod(start), "_wait": wait}
    return type(names[0], (_Req,), namespace), wait
