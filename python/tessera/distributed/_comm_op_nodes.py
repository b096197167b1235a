"""The exchanges of comm_ops taken apart: what starts one, what waits for it, and what both know.

    request = Request(group, device)
    token = All2All_Pooled_Req.apply(group, request, info, pooled)
    ...                                            # computes beside the exchange
    result = All2All_Pooled_Wait.apply(group, request, token)

Both are functions of autograd around one exchange of the engine: backward, the second starts the reverse
exchange and the first waits for it. All ranks take part in it, also one whose input needs no gradient.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C
from tessera.distributed.types import Awaitable, QuantizedCommCodecs

W = TypeVar("W")
_engine = _C.comm_ops


def native_codecs(codecs: QuantizedCommCodecs | None) -> _C.comm_ops.Codecs:
    """Return the engine's codecs."""
    codecs = codecs or QuantizedCommCodecs()
    return _C.comm_ops.Codecs(codecs.forward._codec, codecs.backward._codec)


class ExchangeInfo(abc.ABC):
    """Know one exchange: how its inputs become rows, how these are sent, how results come out of them."""

    codecs: QuantizedCommCodecs | None

    def rows_of(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the inputs as one tensor."""
        return inputs[0]

    @abc.abstractmethod
    def plan(self, pg: ProcessGroup, rows: Tensor) -> _C.comm_ops.PlannedExchange:
        """Return the engine's exchange. Raise ValueError for sizes that do not fit."""

    def _over(self, pg: ProcessGroup) -> tuple[ProcessGroup, _C.comm_ops.Codecs]:
        return pg, native_codecs(self.codecs)

    def results_of(self, rows: Tensor) -> Any:
        """Return what has arrived as results."""
        return rows

    def gradients_of(self, gradient: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
        """Return the gradients of inputs of these shapes."""
        return [gradient]


@dataclass
class All2AllPooledInfo(ExchangeInfo):
    """Say how pooled rows are cut: samples of every rank, columns of every rank."""

    batch_size_per_rank: list[int]
    dim_sum_per_rank: list[int]
    dim_sum_per_rank_tensor: Tensor | None
    cumsum_dim_sum_per_rank_tensor: Tensor | None
    codecs: QuantizedCommCodecs | None = None

    def plan(self, pg: ProcessGroup, rows: Tensor) -> _C.comm_ops.PlannedExchange:
        """Return the engine's exchange."""
        return _engine.alltoall_pooled(rows, self.batch_size_per_rank, self.dim_sum_per_rank, *self._over(pg))


@dataclass
class VariableBatchAll2AllPooledInfo(ExchangeInfo):
    """Say how flat pooled rows are cut, with a batch for every rank and feature."""

    batch_size_per_rank_per_feature: list[list[int]]
    batch_size_per_feature_pre_a2a: list[int]
    emb_dim_per_rank_per_feature: list[list[int]]
    codecs: QuantizedCommCodecs | None = None
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None

    def plan(self, pg: ProcessGroup, rows: Tensor) -> _C.comm_ops.PlannedExchange:
        """Return the engine's exchange."""
        batches = (self.batch_size_per_rank_per_feature, self.batch_size_per_feature_pre_a2a)
        return _engine.variable_batch_alltoall_pooled(
            rows, *batches, self.emb_dim_per_rank_per_feature, *self._over(pg)
        )


@dataclass
class All2AllSequenceInfo(ExchangeInfo):
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

    def plan(self, pg: ProcessGroup, rows: Tensor) -> _C.comm_ops.PlannedExchange:
        """Return the engine's exchange."""
        orders = (self.forward_recat_tensor, self.backward_recat_tensor)
        lengths = self.lengths_after_sparse_data_all2all
        return _engine.alltoall_sequence(
            rows, *orders, lengths, self.input_splits, self.output_splits, *self._over(pg)
        )


@dataclass
class All2AllVInfo(ExchangeInfo):
    """Say how samples are cut over the ranks: columns of every rank, samples of every rank."""

    dims_sum_per_rank: list[int]
    B_global: int
    B_local: int
    B_local_list: list[int]
    D_local_list: list[int]
    input_split_sizes: list[int] = field(default_factory=list)
    output_split_sizes: list[int] = field(default_factory=list)
    codecs: QuantizedCommCodecs | None = None

    def rows_of(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the columns side by side."""
        return torch.cat(list(inputs), dim=1)

    def plan(self, pg: ProcessGroup, rows: Tensor) -> _C.comm_ops.PlannedExchange:
        """Return the engine's exchange."""
        return _engine.alltoallv(rows, self.dims_sum_per_rank, *self._over(pg))

    def results_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return each rank's columns."""
        return tuple(part.contiguous() for part in rows.split(self.dims_sum_per_rank, dim=1))

    def gradients_of(self, gradient: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
        """Return each input's columns."""
        return gradient.split([shape[1] for shape in shapes], dim=1)


@dataclass
class All2AllDenseInfo:
    """Hold the sizes of a dense exchange; no operator of this module reads it."""

    output_splits: list[int]
    batch_size: int
    input_shape: list[int]
    input_splits: list[int]


@dataclass
class ReduceScatterInfo(ExchangeInfo):
    """Hold the shapes of the parts that are summed."""

    input_sizes: list[torch.Size]
    codecs: QuantizedCommCodecs | None = None

    def rows_of(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the parts one after the other, flat; a single one as it is."""
        return inputs[0] if len(inputs) == 1 else torch.cat([part.reshape(-1) for part in inputs])

    def plan(self, pg: ProcessGroup, rows: Tensor) -> _C.comm_ops.PlannedExchange:
        """Return the engine's exchange."""
        return _engine.reduce_scatter_pooled(self.input_sizes, *self._over(pg))

    def gradients_of(self, gradient: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
        """Return those of the parts."""
        parts = gradient.view(-1).split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass
class ReduceScatterBaseInfo(ExchangeInfo):
    """Hold the shape of what is summed and cut evenly."""

    input_sizes: torch.Size
    codecs: QuantizedCommCodecs | None = None

    def plan(self, pg: ProcessGroup, rows: Tensor) -> _C.comm_ops.PlannedExchange:
        """Return the engine's exchange."""
        return _engine.reduce_scatter_base_pooled(rows, *self._over(pg))


@dataclass
class ReduceScatterVInfo(ExchangeInfo):
    """Say how many rows of the sum every rank gets."""

    input_sizes: list[torch.Size]
    input_splits: list[int]
    equal_splits: bool
    total_input_size: list[int]
    codecs: QuantizedCommCodecs | None

    def plan(self, pg: ProcessGroup, rows: Tensor) -> _C.comm_ops.PlannedExchange:
        """Return the engine's exchange."""
        return _engine.reduce_scatter_v_pooled(rows, self.input_splits, *self._over(pg))


@dataclass
class AllGatherBaseInfo(ExchangeInfo):
    """Hold the shape of what every rank gives."""

    input_size: torch.Size
    codecs: QuantizedCommCodecs | None = None

    def plan(self, pg: ProcessGroup, rows: Tensor) -> _C.comm_ops.PlannedExchange:
        """Return the engine's exchange."""
        return _engine.all_gather_base_pooled(rows, *self._over(pg))


@dataclass
class _Journey:
    """Hold what the two nodes of an exchange share; `is_recorded` says whether the first is in the graph."""

    info: ExchangeInfo
    exchange: _C.comm_ops.PlannedExchange
    shapes: list[torch.Size]
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

    def _wait_impl(self) -> W:
        return (self.wait_function or WaitNode).apply(self.pg, self, self.dummy_tensor)


class ReqNode(torch.autograd.Function):
    """Start an exchange. All ranks of the group call it, in the same order."""

    _wait: type[WaitNode]

    @classmethod
    def apply(cls, pg: ProcessGroup, myreq: Request, info: ExchangeInfo, *inputs: Any) -> Tensor:
        """Start on `inputs`, or on a list of them, and return a token for the `…_Wait`."""
        # Autograd sees the tensors of a list only if they are arguments themselves.
        given = inputs[0] if inputs and isinstance(inputs[0], (list, tuple)) else inputs
        myreq.dummy_tensor = super().apply(pg, myreq, info, *given)
        if torch.is_grad_enabled():
            myreq.dummy_tensor.requires_grad_()  # whatever the inputs do: backward is collective
        myreq.wait_function = cls._wait
        return myreq.dummy_tensor

    @staticmethod
    def forward(ctx: Any, pg: ProcessGroup, myreq: Request, info: ExchangeInfo, *inputs: Tensor) -> Tensor:
        """Start and return a token."""
        if myreq._journey is not None:
            raise RuntimeError("comm_ops.Request: it holds an exchange already; make one for each.")
        rows = info.rows_of(inputs)
        exchange = info.plan(pg, rows)
        exchange.start(rows)
        shapes = [part.shape for part in inputs]
        ctx.journey = myreq._journey = _Journey(info, exchange, shapes, any(ctx.needs_input_grad))
        return myreq.dummy_tensor

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of the inputs."""
        journey = ctx.journey
        gradient = journey.exchange.wait_backward()
        return None, None, None, *journey.info.gradients_of(gradient, journey.shapes)


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
        return ctx.journey.info.results_of(ctx.journey.exchange.wait())

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
