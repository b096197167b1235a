"""The exchanges between tables on different ranks, differentiable.

All ranks of the group call each function, in the same order. It starts the exchange and returns an
Awaitable at once. In the backward pass the reverse exchange starts when the gradient of the result is
known and is waited for when the gradient of the input is needed, so that it runs beside what autograd
does in between. Gradients are divided by the size of the group unless
``set_gradient_division(False)`` was called.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C
from tessera.comm._collectives import _TensorAwaitable
from tessera.comm._group import group_or_world
from tessera.distributed._comm_op_nodes import (
    All2AllDenseInfo,
    All2AllPooledInfo,
    All2AllSequenceInfo,
    All2AllVInfo,
    AllGatherBaseInfo,
    ExchangeInfo,
    ReduceScatterBaseInfo,
    ReduceScatterInfo,
    ReduceScatterVInfo,
    ReqNode,
    Request,
    VariableBatchAll2AllPooledInfo,
    WaitNode,
    native_codecs,
)
from tessera.distributed.types import Awaitable, QuantizedCommCodecs

__all__ = [
    "All2AllDenseInfo",
    "All2AllPooledInfo",
    "All2AllSequenceInfo",
    "All2AllVInfo",
    "All2All_Pooled_Req",
    "All2All_Pooled_Wait",
    "All2All_Seq_Req",
    "All2All_Seq_Req_Wait",
    "All2Allv_Req",
    "All2Allv_Wait",
    "AllGatherBaseInfo",
    "AllGatherBase_Req",
    "AllGatherBase_Wait",
    "ReduceScatterBaseInfo",
    "ReduceScatterBase_Req",
    "ReduceScatterBase_Wait",
    "ReduceScatterInfo",
    "ReduceScatterVInfo",
    "ReduceScatterV_Req",
    "ReduceScatterV_Wait",
    "ReduceScatter_Req",
    "ReduceScatter_Wait",
    "Request",
    "VariableBatchAll2AllPooledInfo",
    "Variable_Batch_All2All_Pooled_Req",
    "Variable_Batch_All2All_Pooled_Wait",
    "all_gather_base_pooled",
    "alltoall_pooled",
    "alltoall_sequence",
    "alltoallv",
    "get_gradient_division",
    "reduce_scatter_base_pooled",
    "reduce_scatter_pooled",
    "reduce_scatter_v_per_feature_pooled",
    "reduce_scatter_v_pooled",
    "set_gradient_division",
    "variable_batch_alltoall_pooled",
]


_engine = _C.comm_ops


def _run(info: ExchangeInfo, group: ProcessGroup | None, inputs: Sequence[Tensor]) -> Awaitable[Tensor]:
    rows = info.rows_of(inputs)
    return _TensorAwaitable(info.plan(group_or_world(group), rows).run(rows))


def set_gradient_division(val: bool) -> None:
    """Divide gradients of exchanges by the size of their group (the default), or do not."""
    _engine.set_gradient_division(val)


def get_gradient_division() -> bool:
    """Return whether gradients of exchanges are divided by the size of their group."""
    return _engine.get_gradient_division()


def alltoall_pooled(
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank: list[int],
    dim_sum_per_rank: list[int],
    dim_sum_per_rank_tensor: Tensor | None = None,
    cumsum_dim_sum_per_rank_tensor: Tensor | None = None,
    group: ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Trade pooled embeddings: my tables for all samples become all tables for my samples.

    Rows of the input and columns of the result are in rank order. The two tensors of sums are accepted
    for the signature's sake; the lists say it all.
    """
    info = All2AllPooledInfo(
        batch_size_per_rank, dim_sum_per_rank, dim_sum_per_rank_tensor, cumsum_dim_sum_per_rank_tensor, codecs
    )
    return _run(info, group, [a2a_pooled_embs_tensor])


def variable_batch_alltoall_pooled(
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank_per_feature: list[list[int]],
    batch_size_per_feature_pre_a2a: list[int],
    emb_dim_per_rank_per_feature: list[list[int]],
    group: ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Trade flat pooled embeddings with a batch size for every rank and feature."""
    info = VariableBatchAll2AllPooledInfo(
        batch_size_per_rank_per_feature, batch_size_per_feature_pre_a2a, emb_dim_per_rank_per_feature, codecs
    )
    return _run(info, group, [a2a_pooled_embs_tensor])


def alltoall_sequence(
    a2a_sequence_embs_tensor: Tensor,
    forward_recat_tensor: Tensor | None,
    backward_recat_tensor: Tensor | None,
    lengths_after_sparse_data_all2all: Tensor,
    input_splits: list[int],
    output_splits: list[int],
    variable_batch_size: bool = False,
    group: ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Bring embeddings of single ids back to the ranks that sent the ids.

    The splits are those of the ids: sent by this rank, and received by it. Whether batches vary is seen
    from the sizes of the recat tensors.
    """
    info = All2AllSequenceInfo(
        a2a_sequence_embs_tensor.size(-1),
        lengths_after_sparse_data_all2all,
        forward_recat_tensor,
        backward_recat_tensor,
        input_splits,
        output_splits,
        variable_batch_size,
        codecs,
    )
    return _run(info, group, [a2a_sequence_embs_tensor])


def alltoallv(
    inputs: list[Tensor],
    out_split: list[int] | None = None,
    per_rank_split_lengths: list[int] | None = None,
    group: ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[list[Tensor]]:
    """Cut the samples of all inputs over the ranks; get each rank's columns for mine.

    `out_split` is the sum of dims of each rank; `per_rank_split_lengths` the number of inputs of each,
    when all have the same dim. Gradients are not divided.
    """
    if out_split is None:
        if per_rank_split_lengths is None:
            raise ValueError("alltoallv: give out_split or per_rank_split_lengths.")
        if not inputs:
            raise ValueError("alltoallv: per_rank_split_lengths needs an input to know the dim.")
        out_split = [length * inputs[0].size(1) for length in per_rank_split_lengths]
    if not inputs:
        raise ValueError("sharding.alltoallv: no inputs were given.")
    info = All2AllVInfo(out_split, inputs[0].size(0), 0, [], [part.size(1) for part in inputs], codecs=codecs)
    pending = _run(info, group, inputs)
    pending.callbacks.append(lambda columns: list(columns.split(out_split, dim=1)))
    return pending


def reduce_scatter_pooled(
    inputs: list[Tensor], group: ProcessGroup | None = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Sum everybody's ``inputs[r]`` on rank r."""
    info = ReduceScatterInfo([part.size() for part in inputs], codecs)
    return _run(info, group, inputs)


def reduce_scatter_base_pooled(
    input: Tensor, group: ProcessGroup | None = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Sum over the ranks and cut the rows evenly."""
    return _run(ReduceScatterBaseInfo(input.size(), codecs), group, [input])


def reduce_scatter_v_pooled(
    input: Tensor,
    input_splits: list[int],
    group: ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Sum over the ranks and give ``input_splits[r]`` rows to rank r."""
    info = ReduceScatterVInfo([input.size()], input_splits, False, list(input.size()), codecs)
    return _run(info, group, [input])


def reduce_scatter_v_per_feature_pooled(
    input: Tensor,
    batch_size_per_rank_per_feature: list[list[int]],
    embedding_dims: list[int],
    group: ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Sum a flat tensor over the ranks and give rank r its samples of every feature."""
    planned = _engine.reduce_scatter_v_per_feature_pooled(
        input, batch_size_per_rank_per_feature, embedding_dims, group_or_world(group), native_codecs(codecs)
    )
    return _TensorAwaitable(planned.run(input))


def all_gather_base_pooled(
    input: Tensor, group: ProcessGroup | None = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Stack the rows of all ranks; the backward pass sums and cuts them."""
    return _run(AllGatherBaseInfo(input.size(), codecs), group, [input])


# ---- the same taken apart ----


def _nodes(req: str, wait: str, function: str) -> tuple[type[ReqNode], type[WaitNode]]:
    of_wait = {"__module__": __name__, "__doc__": f"Wait for `{function}`."}
    waits = type(wait, (WaitNode,), of_wait)
    of_req = {"__module__": __name__, "__doc__": f"Start `{function}`.", "_wait": waits}
    return type(req, (ReqNode,), of_req), waits


All2All_Pooled_Req, All2All_Pooled_Wait = _nodes(
    "All2All_Pooled_Req", "All2All_Pooled_Wait", "alltoall_pooled"
)
Variable_Batch_All2All_Pooled_Req, Variable_Batch_All2All_Pooled_Wait = _nodes(
    "Variable_Batch_All2All_Pooled_Req",
    "Variable_Batch_All2All_Pooled_Wait",
    "variable_batch_alltoall_pooled",
)
All2All_Seq_Req, All2All_Seq_Req_Wait = _nodes("All2All_Seq_Req", "All2All_Seq_Req_Wait", "alltoall_sequence")
All2Allv_Req, All2Allv_Wait = _nodes("All2Allv_Req", "All2Allv_Wait", "alltoallv")
ReduceScatter_Req, ReduceScatter_Wait = _nodes(
    "ReduceScatter_Req", "ReduceScatter_Wait", "reduce_scatter_pooled"
)
ReduceScatterBase_Req, ReduceScatterBase_Wait = _nodes(
    "ReduceScatterBase_Req", "ReduceScatterBase_Wait", "reduce_scatter_base_pooled"
)
ReduceScatterV_Req, ReduceScatterV_Wait = _nodes(
    "ReduceScatterV_Req", "ReduceScatterV_Wait", "reduce_scatter_v_pooled"
)
AllGatherBase_Req, AllGatherBase_Wait = _nodes(
    "AllGatherBase_Req", "AllGatherBase_Wait", "all_gather_base_pooled"
)
