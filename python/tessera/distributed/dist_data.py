"""Features to the ranks that own their tables, and rows back.

>>> _get_recat(2, 4).tolist()
[0, 2, 4, 6, 1, 3, 5, 7]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tessera import _C, comm
from tessera.comm._collectives import _TensorAwaitable
from tessera.distributed._comm_op_nodes import native_codecs
from tessera.distributed.comm_ops import (
    all_gather_base_pooled,
    reduce_scatter_base_pooled,
    reduce_scatter_v_per_feature_pooled,
    reduce_scatter_v_pooled,
    variable_batch_alltoall_pooled,
)
from tessera.distributed.types import Awaitable, QuantizedCommCodecs
from tessera.sparse._keyed_jagged import kjt_of
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "EmbeddingsAllToOne",
    "EmbeddingsAllToOneReduce",
    "JaggedTensorAllToAll",
    "KJTAllToAll",
    "KJTAllToAllSplitsAwaitable",
    "KJTAllToAllTensorsAwaitable",
    "KJTOneToAll",
    "PooledEmbeddingsAllGather",
    "PooledEmbeddingsAllToAll",
    "PooledEmbeddingsAwaitable",
    "PooledEmbeddingsReduceScatter",
    "SeqEmbeddingsAllToOne",
    "SequenceEmbeddingsAllToAll",
    "SequenceEmbeddingsAwaitable",
    "SplitsAllToAllAwaitable",
    "VariableBatchPooledEmbeddingsAllToAll",
    "VariableBatchPooledEmbeddingsReduceScatter",
]

_engine = _C.dist_data
_Callbacks = list[Callable[[Tensor], Tensor]]


def _get_recat(
    local_split: int,
    num_splits: int,
    stagger: int = 1,
    device: torch.device | None = None,
    batch_size_per_rank: Sequence[int] | None = None,
) -> Tensor | None:
    """Return the order in which received segments, rank by rank, become key by key."""
    recat = _engine.get_recat(local_split, num_splits, stagger, batch_size_per_rank or [])
    return recat if recat is None or device is None else recat.to(device)


class SplitsAllToAllAwaitable(Awaitable[list[list[int]]]):
    """Tell every rank its numbers: K tensors of one number per rank, in one message."""

    def __init__(self, input_tensors: Sequence[Tensor], pg: ProcessGroup) -> None:
        super().__init__()
        self._pending = _engine.exchange_splits([tensor.tolist() for tensor in input_tensors], pg)

    def _wait_impl(self) -> list[list[int]]:
        return self._pending.wait()


class KJTAllToAllTensorsAwaitable(Awaitable[KeyedJaggedTensor]):
    """Hold features on their way. After the wait, `received` has the sizes of the exchange."""

    def __init__(self, pending) -> None:
        super().__init__()
        self._pending = pending
        self.received = None

    def _wait_impl(self) -> KeyedJaggedTensor:
        self.received = self._pending.wait()
        return kjt_of(self.received.features)


class KJTAllToAllSplitsAwaitable(Awaitable[KJTAllToAllTensorsAwaitable]):
    """Hold the sizes of features on their way; waiting sends the features."""

    def __init__(self, pending) -> None:
        super().__init__()
        self._pending = pending

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        return KJTAllToAllTensorsAwaitable(self._pending.wait())


class KJTAllToAll(nn.Module):
    """Send each key to the rank that owns it: `splits[r]` keys, in order, to rank r.

    Collective. The result is waited for twice: for the sizes, then for the features.
    """

    def __init__(self, pg: ProcessGroup, splits: Sequence[int], stagger: int = 1) -> None:
        super().__init__()
        if len(splits) != pg.size():
            raise ValueError(
                f"sharding.kjt_alltoall: there are splits of {len(splits)} ranks; the group has {pg.size()}."
            )
        self._pg = pg
        self._splits = list(splits)
        self._stagger = stagger

    def forward(self, input: KeyedJaggedTensor) -> Awaitable[KJTAllToAllTensorsAwaitable]:
        """Start the exchange."""
        return KJTAllToAllSplitsAwaitable(
            _engine.kjt_alltoall(input._engine(), self._splits, self._stagger, self._pg)
        )


class JaggedTensorAllToAll(Awaitable[JaggedTensor]):
    """Send bags of one feature: `num_items_to_send[r]` bags, in order, to rank r. Collective.

    `num_items_to_receive[r]` bags come from rank r; they lie in rank order.
    """

    def __init__(
        self,
        jt: JaggedTensor,
        num_items_to_send: Tensor,
        num_items_to_receive: Tensor,
        pg: ProcessGroup,
    ) -> None:
        super().__init__()
        self._pg = pg
        self._jt = jt
        self._send = num_items_to_send.tolist()
        self._receive = num_items_to_receive.tolist()
        self._lengths = comm.all_to_all_v_async(jt.lengths(), self._send, pg, self._receive)

    def _wait_impl(self) -> JaggedTensor:
        lengths = self._lengths.wait()
        sent = [int(part.sum()) for part in self._jt.lengths().split(self._send)]
        received = [int(part.sum()) for part in lengths.split(self._receive)]
        given = (self._jt.values(), self._jt.weights_or_none())
        pending = [
            None if part is None else comm.all_to_all_v_async(part, sent, self._pg, received)
            for part in given
        ]
        values, weights = (None if part is None else part.wait() for part in pending)
        return JaggedTensor(values, weights=weights, lengths=lengths)


class KJTOneToAll(nn.Module):
    """Cut features by numbers of keys and copy part r to device r. Nothing is communicated."""

    def __init__(self, splits: Sequence[int], world_size: int, device: torch.device | None = None) -> None:
        super().__init__()
        if len(splits) != world_size:
            raise ValueError(
                f"sharding.kjt_one_to_all: there are {len(splits)} parts for {world_size} devices."
            )
        kind = torch.device(device or "cpu").type
        self._splits = list(splits)
        self._devices = [
            torch.device(kind) if kind in ("cpu", "meta") else torch.device(kind, rank)
            for rank in range(world_size)
        ]

    def forward(self, kjt: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        """Return the parts."""
        return [kjt_of(part) for part in _engine.kjt_one_to_all(kjt._engine(), self._splits, self._devices)]


class PooledEmbeddingsAwaitable(Awaitable[Tensor]):
    """Hold pooled rows on their way; `callbacks` change them when they are waited for."""

    def __init__(self, tensor_awaitable: Awaitable[Tensor]) -> None:
        super().__init__()
        self._tensor_awaitable = tensor_awaitable

    def _wait_impl(self) -> Tensor:
        return self._tensor_awaitable.wait()


class _Exchange(nn.Module):
    def __init__(
        self,
        pg: ProcessGroup,
        codecs: QuantizedCommCodecs | None = None,
        *,
        callbacks: _Callbacks | None = None,
    ) -> None:
        super().__init__()
        self._pg = pg
        self._callbacks: _Callbacks = list(callbacks or [])
        self._codecs = codecs

    @property
    def callbacks(self) -> _Callbacks:
        """The functions that change results when they are waited for."""
        return self._callbacks

    def _awaitable(self, pending: Awaitable[Tensor]) -> PooledEmbeddingsAwaitable:
        awaitable = PooledEmbeddingsAwaitable(pending)
        awaitable.callbacks.extend(self._callbacks)
        return awaitable


class PooledEmbeddingsAllToAll(_Exchange):
    """Send pooled rows to the ranks of their samples."""

    def __init__(
        self,
        pg: ProcessGroup,
        dim_sum_per_rank: Sequence[int],
        device: torch.device | None = None,
        callbacks: _Callbacks | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__(pg, codecs, callbacks=callbacks)
        self._dim_sum_per_rank = list(dim_sum_per_rank)

    def forward(
        self, local_embs: Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> PooledEmbeddingsAwaitable:
        """Start the exchange; without batch sizes all ranks have equal ones."""
        pending = _engine.pooled_embeddings_alltoall(
            local_embs,
            self._dim_sum_per_rank,
            self._pg,
            batch_size_per_rank or [],
            native_codecs(self._codecs),
        )
        return self._awaitable(_TensorAwaitable(pending))


class VariableBatchPooledEmbeddingsAllToAll(_Exchange):
    """Send pooled rows to the ranks of their samples; every feature has a batch of its own."""

    def __init__(
        self,
        pg: ProcessGroup,
        emb_dim_per_rank_per_feature: Sequence[Sequence[int]],
        device: torch.device | None = None,
        callbacks: _Callbacks | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__(pg, codecs, callbacks=callbacks)
        self._dims = [list(dims) for dims in emb_dim_per_rank_per_feature]

    def forward(
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: Sequence[Sequence[int]],
        batch_size_per_feature_pre_a2a: Sequence[int],
    ) -> PooledEmbeddingsAwaitable:
        """Start the exchange."""
        return self._awaitable(
            variable_batch_alltoall_pooled(
                local_embs,
                batch_size_per_rank_per_feature,
                batch_size_per_feature_pre_a2a,
                self._dims,
                self._pg,
                self._codecs,
            )
        )


class PooledEmbeddingsReduceScatter(_Exchange):
    """Sum pooled rows over the ranks, each part on the rank that keeps it."""

    def forward(
        self, local_embs: Tensor, input_splits: Sequence[int] | None = None
    ) -> PooledEmbeddingsAwaitable:
        """Start the sum; without splits the parts are equal."""
        if input_splits is None:
            return self._awaitable(reduce_scatter_base_pooled(local_embs, self._pg, self._codecs))
        return self._awaitable(reduce_scatter_v_pooled(local_embs, input_splits, self._pg, self._codecs))


class VariableBatchPooledEmbeddingsReduceScatter(_Exchange):
    """Sum pooled rows over the ranks; every feature has a batch of its own."""

    def forward(
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: Sequence[Sequence[int]],
        embedding_dims: Sequence[int],
    ) -> PooledEmbeddingsAwaitable:
        """Start the sum."""
        return self._awaitable(
            reduce_scatter_v_per_feature_pooled(
                local_embs, batch_size_per_rank_per_feature, embedding_dims, self._pg, self._codecs
            )
        )


class PooledEmbeddingsAllGather(_Exchange):
    """Give every rank the rows of all."""

    def forward(self, local_emb: Tensor) -> PooledEmbeddingsAwaitable:
        """Start the gathering."""
        return self._awaitable(all_gather_base_pooled(local_emb, self._pg, self._codecs))


class SequenceEmbeddingsAwaitable(Awaitable[Tensor]):
    """Hold the rows of single ids on their way."""

    def __init__(
        self,
        tensor_awaitable: Awaitable[Tensor],
        unbucketize_permute_tensor: Tensor | None = None,
        embedding_dim: int = 0,
    ) -> None:
        super().__init__()
        self._tensor_awaitable = tensor_awaitable
        if unbucketize_permute_tensor is not None:
            self.callbacks.append(lambda rows: rows.index_select(0, unbucketize_permute_tensor))

    def _wait_impl(self) -> Tensor:
        return self._tensor_awaitable.wait()


class SequenceEmbeddingsAllToAll(nn.Module):
    """Send the rows of single ids back to the ranks that asked for them."""

    def __init__(
        self,
        pg: ProcessGroup,
        features_per_rank: Sequence[int],
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._pg = pg
        self._features_per_rank = list(features_per_rank)
        self._codecs = codecs

    def forward(
        self,
        local_embs: Tensor,
        lengths: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        unbucketize_permute_tensor: Tensor | None = None,
        batch_size_per_rank: Sequence[int] | None = None,
        sparse_features_recat: Tensor | None = None,
    ) -> SequenceEmbeddingsAwaitable:
        """Start the exchange; splits are those of the ids."""
        pending = _engine.sequence_embeddings_alltoall(
            local_embs,
            lengths,
            input_splits=input_splits,
            output_splits=output_splits,
            features_per_rank=self._features_per_rank,
            group=self._pg,
            batch_size_per_rank=batch_size_per_rank or [],
            sparse_features_recat=sparse_features_recat,
            codecs=native_codecs(self._codecs),
        )
        return SequenceEmbeddingsAwaitable(
            _TensorAwaitable(pending), unbucketize_permute_tensor, local_embs.size(1)
        )


class _AllToOne(nn.Module):
    def __init__(self, device: torch.device, world_size: int) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._world_size = world_size

    def set_device(self, device_str: str) -> None:
        """Change where results go."""
        self._device = torch.device(device_str)

    def _check(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._world_size:
            raise ValueError(f"sharding.all_to_one: there are {len(tensors)} parts, not {self._world_size}.")


class EmbeddingsAllToOne(_AllToOne):
    """Move parts to one device and put them side by side."""

    def __init__(self, device: torch.device, world_size: int, cat_dim: int) -> None:
        super().__init__(device, world_size)
        self._cat_dim = cat_dim

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the parts along `cat_dim`."""
        self._check(tensors)
        return _engine.embeddings_all_to_one(tensors, self._device, self._cat_dim)


class EmbeddingsAllToOneReduce(_AllToOne):
    """Move parts to one device and sum them."""

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum."""
        self._check(tensors)
        return _engine.embeddings_all_to_one_reduce(tensors, self._device)


class SeqEmbeddingsAllToOne(_AllToOne):
    """Move parts to one device."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts."""
        self._check(tensors)
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]
