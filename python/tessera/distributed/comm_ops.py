"""The exchanges between tables on different ranks, differentiable.

All ranks of the group call each function, in the same order. It starts the exchange and returns an
Awaitable at once. In the backward pass the reverse exchange starts when the gradient of the result is
known and is waited for when the gradient of the input is needed, so that it runs beside what autograd
does in between. Gradients are divided by the size of the group unless
``set_gradient_division(False)`` was called.
"""

from __future__ import annotations

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
    ReduceScatterBaseInfo,
    ReduceScatterInfo,
    ReduceScatterVInfo,
    Request,
    VariableBatchAll2AllPooledInfo,
    make_pair,
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


class _ListAwaitable(Awaitable[list[Tensor]]):
    def __init__(self, pending: _C.comm_ops.PendingList):
        super().__init__()
        self._pending = pending

    def _wait_impl(self) -> list[Tensor]:
        return self._pending.wait()


def _native(codecs: QuantizedCommCodecs | None) -> _C.comm_ops.Codecs:
    codecs = codecs or QuantizedCommCodecs()
    return _C.comm_ops.Codecs(codecs.forward._codec, codecs.backward._codec)


def set_gradient_division(val: bool) -> None:
    """Divide gradients of exchanges by the size of their group (the default), or do not."""
    _C.comm_ops.set_gradient_division(val)


def get_gradient_division() -> bool:
    """Return whether gradients of exchanges are divided by the size of their group."""
    return _C.comm_ops.get_gradient_division()


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
    return _TensorAwaitable(
        _C.comm_ops.alltoall_pooled(
            a2a_pooled_embs_tensor,
            batch_size_per_rank,
            dim_sum_per_rank,
            group_or_world(group),
            _native(codecs),
        )
    )


def variable_batch_alltoall_pooled(
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank_per_feature: list[list[int]],
    batch_size_per_feature_pre_a2a: list[int],
    emb_dim_per_rank_per_feature: list[list[int]],
    group: ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Trade flat pooled embeddings with a batch size for every rank and feature."""
    return _TensorAwaitable(
        _C.comm_ops.variable_batch_alltoall_pooled(
            a2a_pooled_embs_tensor,
            batch_size_per_rank_per_feature,
            batch_size_per_feature_pre_a2a,
            emb_dim_per_rank_per_feature,
            group_or_world(group),
            _native(codecs),
        )
    )


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
    return _TensorAwaitable(
        _C.comm_ops.alltoall_sequence(
            a2a_sequence_embs_tensor,
            forward_recat_tensor,
            backward_recat_tensor,
            lengths_after_sparse_data_all2all,
            input_splits,
            output_splits,
            group_or_world(group),
            _native(codecs),
        )
    )


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
    return _ListAwaitable(_C.comm_ops.alltoallv(inputs, out_split, group_or_world(group), _native(codecs)))


def reduce_scatter_pooled(
    inputs: list[Tensor], group: ProcessGroup | None = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Sum everybody's ``inputs[r]`` on rank r."""
    return _TensorAwaitable(_C.comm_ops.reduce_scatter_pooled(inputs, group_or_world(group), _native(codecs)))


def reduce_scatter_base_pooled(
    input: Tensor, group: ProcessGroup | None = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Sum over the ranks and cut the rows evenly."""
    return _TensorAwaitable(
        _C.comm_ops.reduce_scatter_base_pooled(input, group_or_world(group), _native(codecs))
    )


def reduce_scatter_v_pooled(
    input: Tensor,
    input_splits: list[int],
    group: ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Sum over the ranks and give ``input_splits[r]`` rows to rank r."""
    return _TensorAwaitable(
        _C.comm_ops.reduce_scatter_v_pooled(input, input_splits, group_or_world(group), _native(codecs))
    )


def reduce_scatter_v_per_feature_pooled(
    input: Tensor,
    batch_size_per_rank_per_feature: list[list[int]],
    embedding_dims: list[int],
    group: ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Sum a flat tensor over the ranks and give rank r its samples of every feature."""
    return _TensorAwaitable(
        _C.comm_ops.reduce_scatter_v_per_feature_pooled(
            input,
            batch_size_per_rank_per_feature,
            embedding_dims,
            group_or_world(group),
            _native(codecs),
        )
    )


def all_gather_base_pooled(
    input: Tensor, group: ProcessGroup | None = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Stack the rows of all ranks; the backward pass sums and cuts them."""
    return _TensorAwaitable(_C.comm_ops.all_gather_base_pooled(input, group_or_world(group), _native(codecs)))


# ---- the same taken apart ----

All2All_Pooled_Req, All2All_Pooled_Wait = make_pair(
    ("All2All_Pooled_Req", "All2All_Pooled_Wait"),
    lambda pg, info, rows: alltoall_pooled(
        rows, info.batch_size_per_rank, info.dim_sum_per_rank, group=pg, codecs=info.codecs
    ),
    __name__,
)
Variable_Batch_All2All_Pooled_Req, Variable_Batch_All2All_Pooled_Wait = make_pair(
    ("Variable_Batch_All2All_Pooled_Req", "Variable_Batch_All2All_Pooled_Wait"),
    lambda pg, info, rows: variable_batch_alltoall_pooled(
        rows,
        info.batch_size_per_rank_per_feature,
        info.batch_size_per_feature_pre_a2a,
        info.emb_dim_per_rank_per_feature,
        pg,
        info.codecs,
    ),
    __name__,
)
All2All_Seq_Req, All2All_Seq_Req_Wait = make_pair(
    ("All2All_Seq_Req", "All2All_Seq_Req_Wait"),
    lambda pg, info, rows: alltoall_sequence(
        rows,
        info.forward_recat_tensor,
        info.backward_recat_tensor,
        info.lengths_after_sparse_data_all2all,
        info.input_splits,
        info.output_splits,
        info.variable_batch_size,
        pg,
        info.codecs,
    ),
    __name__,
)
All2Allv_Req, All2Allv_Wait = make_pair(
    ("All2Allv_Req", "All2Allv_Wait"),
    lambda pg, info, *inputs: alltoallv(list(inputs), info.dims_sum_per_rank, group=pg, codecs=info.codecs),
    __name__,
)
ReduceScatter_Req, ReduceScatter_Wait = make_pair(
    ("ReduceScatter_Req", "ReduceScatter_Wait"),
    lambda pg, info, *inputs: reduce_scatter_pooled(list(inputs), pg, info.codecs),
    __name__,
)
ReduceScatterBase_Req, ReduceScatterBase_Wait = make_pair(
    ("ReduceScatterBase_Req", "ReduceScatterBase_Wait"),
    lambda pg, info, rows: reduce_scatter_base_pooled(rows, pg, info.codecs),
    __name__,
)
ReduceScatterV_Req, ReduceScatterV_Wait = make_pair(
    ("ReduceScatterV_Req", "ReduceScatterV_Wait"),
    lambda pg, info, rows: reduce_scatter_v_pooled(rows, info.input_splits, pg, info.codecs),
    __name__,
)
AllGatherBase_Req, AllGatherBase_Wait = make_pair(
    ("AllGatherBase_Req", "AllGatherBase_Wait"),
    lambda pg, info, rows: all_gather_base_pooled(rows, pg, info.codecs),
    __name__,
)
