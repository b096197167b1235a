"""The exchanges of comm_ops taken apart: what starts one, what waits for it, and what both know.

    request = Request(group, device)
    token = All2All_Pooled_Req.apply(group, request, info, pooled)
    ...                                            # computes beside the exchange
    result = All2All_Pooled_Wait.apply(group, request, token)

Both are functions of autograd around one exchange of the engine: backward, the second starts the reverse
exchange and the first waits for it. All ranks take part in it, also one whose input needs no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C
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


@dataclass
class _Journey:
    """Hold what the two nodes of an exchange share; `is_recorded` says whether the first is in the graph."""

    exchange: _C.comm_ops.PlannedExchange
    is_recorded: bool


class Request(Awaitable[W]):
    """Hold an exchange under way, from its `…_Req` to its `…_Wait`."""

    def __init__(self, pg: ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.pg = pg
        self.device = device
        self.wait_function: type[WaitNode] | None = None
        self.dummy_tensor = torch.empty(1, requires_grad=True, device=device)
        self._journey: _Journey | None = None
        self._result: Any = None
        self.results: Callable[[Tensor], Any] = lambda arrived: arrived

    def _wait_impl(self) -> W:
        return (self.wait_function or WaitNode).apply(self.pg, self, self.dummy_tensor)


def start(
    ctx: Any, wait: type[WaitNode], myreq: Request, exchange: _C.comm_ops.PlannedExchange, rows: Tensor
) -> Tensor:
    """Start `exchange` on `rows` and return a token for `wait`."""
    if myreq._journey is not None:
        raise RuntimeError("comm_ops.Request: it holds an exchange already; make one for each.")
    exchange.start(rows)
    ctx.journey = myreq._journey = _Journey(exchange, any(ctx.needs_input_grad))
    myreq.wait_function = wait
    return myreq.dummy_tensor


class ReqNode(torch.autograd.Function):
    """Start an exchange. All ranks of the group call it, in the same order."""

    @classmethod
    def apply(cls, pg: ProcessGroup, myreq: Request, info: Any, *inputs: Tensor) -> Tensor:
        """Start on `inputs` and return a token for the `…_Wait`."""
        myreq.dummy_tensor = super().apply(pg, myreq, info, *inputs)
        if torch.is_grad_enabled():
            myreq.dummy_tensor.requires_grad_()  # whatever the inputs do: backward is collective
        return myreq.dummy_tensor

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of the inputs."""
        gradient = ctx.journey.exchange.wait_backward()
        return None, None, None, *(ctx.gradients(gradient) if hasattr(ctx, "gradients") else (gradient,))


class WaitNode(torch.autograd.Function):
    """Wait for an exchange."""

    @classmethod
    def apply(cls, pg: ProcessGroup, myreq: Request, *dummy_tensor: Tensor) -> Any:
        """Return what the exchange of `myreq` gives, part of the graph of autograd."""
        if myreq.wait_function is not None and myreq.wait_function is not cls:
            raise RuntimeError(
                f"comm_ops: {cls.__name__} waits for an exchange that {myreq.wait_function.__name__} ends."
            )
        if myreq._result is None:
            myreq._result = super().apply(pg, myreq, *(dummy_tensor or (myreq.dummy_tensor,)))
        return myreq._result

    @staticmethod
    def forward(ctx: Any, pg: ProcessGroup, myreq: Request, *dummy_tensor: Tensor) -> Any:
        """Return what has arrived."""
        if myreq._journey is None:
            raise RuntimeError("comm_ops.Request: nothing was started; call the …_Req of an exchange first.")
        ctx.journey = myreq._journey
        return myreq.results(ctx.journey.exchange.wait())

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[None, None, Tensor]:
        """Start the reverse exchange."""
        journey = ctx.journey
        journey.exchange.start_backward(
            grad_output[0] if len(grad_output) == 1 else torch.cat(grad_output, 1)
        )
        if not journey.is_recorded:
            journey.exchange.wait_backward()  # nobody else will
        return None, None, grad_output[0].new_zeros(1)
