"""Features on their way to sharded tables, and what a sharding consists of."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._shard.metadata import ShardMetadata

from tessera import _C
from tessera.distributed.dist_data import KJTAllToAllTensorsAwaitable
from tessera.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    EmbeddingComputeKernel,
    FeatureShardingMixIn,
    GroupedEmbeddingConfig,
    KJTList,
    ListOfKJTList,
    ShardedEmbeddingTable,
)
from tessera.distributed.types import Awaitable, ParameterSharding, QuantizedCommCodecs
from tessera.modules.embedding_configs import EmbeddingTableConfig
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.streamable import Multistreamable

__all__ = [
    "BaseEmbeddingDist",
    "BaseSparseFeaturesDist",
    "EmbeddingSharding",
    "EmbeddingShardingContext",
    "EmbeddingShardingInfo",
    "FusedKJTListSplitsAwaitable",
    "KJTListAwaitable",
    "KJTListSplitsAwaitable",
    "KJTSplitsAllToAllMeta",
    "ListOfKJTListAwaitable",
    "ListOfKJTListSplitsAwaitable",
    "bucketize_kjt_before_all2all",
    "group_tables",
]

C = TypeVar("C", bound=Multistreamable)
F = TypeVar("F")
T = TypeVar("T")
W = TypeVar("W")


def bucketize_kjt_before_all2all(
    kjt: KeyedJaggedTensor,
    num_buckets: int,
    block_sizes: torch.Tensor,
    output_permute: bool = False,
    bucketize_pos: bool = False,
    block_bucketize_row_pos: list[torch.Tensor] | None = None,
) -> tuple[KeyedJaggedTensor, torch.Tensor | None]:
    """Spread the ids of every key over buckets of `block_sizes` rows, for row-wise tables.

    The result has all keys `num_buckets` times, bucket by bucket. With `bucketize_pos` its weights are the
    places the ids had in their bags. `block_bucketize_row_pos` says for each key where the buckets begin,
    and where the last ends. The second result says where each id went, if `output_permute`.

    >>> kjt = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([0, 3, 1]), torch.tensor([3]))
    >>> spread, _ = bucketize_kjt_before_all2all(kjt, 2, torch.tensor([2]))
    >>> spread.lengths().tolist(), spread.values().tolist()
    ([2, 1], [0, 1, 1])
    """
    num_keys = len(kjt.keys())
    if block_sizes.numel() != num_keys:
        raise ValueError(
            f"sharding.bucketize: there are {block_sizes.numel()} block sizes for {num_keys} keys."
        )
    starts = [position.tolist() for position in block_bucketize_row_pos or []]
    lengths, values, weights, positions, permute = _C.jagged.bucketize(
        kjt.lengths().view(-1),
        kjt.values(),
        None if bucketize_pos else kjt.weights_or_none(),
        num_buckets=num_buckets,
        bags_per_feature=kjt.stride_per_key(),
        block_sizes=[] if starts else block_sizes.tolist(),
        block_starts=starts,
        positions=bucketize_pos,
        unbucketize=output_permute,
    )
    is_variable = kjt.variable_stride_per_key()
    spread = KeyedJaggedTensor(
        keys=list(kjt.keys()) * num_buckets,
        values=values,
        weights=positions if bucketize_pos else weights,
        lengths=lengths,
        stride=None if is_variable else kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() * num_buckets if is_variable else None,
        inverse_indices=kjt.inverse_indices_or_none(),
    )
    return spread, permute


# Kernels that may share a call: where rows lie does not part them.
_FAMILIES = {
    EmbeddingComputeKernel.FUSED_UVM: EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.FUSED_UVM_CACHING: EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.QUANT_UVM: EmbeddingComputeKernel.QUANT,
    EmbeddingComputeKernel.QUANT_UVM_CACHING: EmbeddingComputeKernel.QUANT,
}
_LOAD_FACTOR = "cache_load_factor"


def _has_cache(table: ShardedEmbeddingTable) -> bool:
    return table.compute_kernel in (
        EmbeddingComputeKernel.FUSED_UVM_CACHING,
        EmbeddingComputeKernel.QUANT_UVM_CACHING,
    )


def _grouping_key(table: ShardedEmbeddingTable) -> tuple:
    params = {key: value for key, value in (table.fused_params or {}).items() if key != _LOAD_FACTOR}
    prefetches = bool(params.get("prefetch_pipeline")) and _has_cache(table)
    return (
        table.data_type,
        table.pooling,
        table.has_feature_processor,
        tuple(sorted(params.items(), key=lambda item: item[0])),
        _FAMILIES.get(table.compute_kernel, table.compute_kernel),
        table.local_cols if prefetches else None,
        prefetches,
    )


def _load_factor(tables: Sequence[ShardedEmbeddingTable]) -> float | None:
    """Return the mean load factor of the cached tables, weighted by their rows."""
    cached = [t for t in tables if _has_cache(t) and (t.fused_params or {}).get(_LOAD_FACTOR) is not None]
    rows = sum(table.num_embeddings for table in cached)
    if not rows:
        return None
    return sum(table.fused_params[_LOAD_FACTOR] * table.num_embeddings for table in cached) / rows


def _group(tables: Sequence[ShardedEmbeddingTable]) -> list[GroupedEmbeddingConfig]:
    groups: dict[tuple, list[ShardedEmbeddingTable]] = {}
    for table in tables:
        groups.setdefault(_grouping_key(table), []).append(table)
    configs = []
    for (data_type, pooling, has_processor, params, kernel, *_), members in groups.items():
        fused_params = dict(params)
        load_factor = _load_factor(members)
        if load_factor is not None:
            fused_params[_LOAD_FACTOR] = load_factor
        configs.append(
            GroupedEmbeddingConfig(
                data_type, pooling, members[0].is_weighted, has_processor, kernel, members, fused_params
            )
        )
    return configs


def group_tables(tables_per_rank: list[list[ShardedEmbeddingTable]]) -> list[list[GroupedEmbeddingConfig]]:
    """Put the tables of each rank that can be looked up in one call together.

    They agree in data type, pooling, feature processor, kernel and fused params. Groups come in the order
    of their first table, tables keep theirs; so the order of features may change. All tables are weighted
    or none.
    """
    weighted = {table.is_weighted for tables in tables_per_rank for table in tables}
    if len(weighted) > 1:
        raise ValueError("sharding.group_tables: some tables are weighted and some are not.")
    return [_group(tables) for tables in tables_per_rank]


@dataclass
class EmbeddingShardingContext(Multistreamable):
    """Keep the batch sizes of one batch, from the features to the rows."""

    batch_size_per_rank: list[int] = field(default_factory=list)
    batch_size_per_rank_per_feature: list[list[int]] = field(default_factory=list)
    batch_size_per_feature_pre_a2a: list[int] = field(default_factory=list)
    variable_batch_per_feature: bool = False

    def record_stream(self, stream: torch.Stream) -> None:
        """Do nothing: there are no tensors."""


@dataclass
class EmbeddingShardingInfo:
    """Hold what is known of one table before it is sharded."""

    embedding_config: EmbeddingTableConfig
    param_sharding: ParameterSharding
    param: torch.Tensor
    fused_params: dict[str, Any] | None = None


@dataclass
class KJTSplitsAllToAllMeta:
    """Hold everything that is needed to send features once the sizes are known."""

    pg: ProcessGroup
    _input: KeyedJaggedTensor
    splits: list[int]
    splits_tensors: list[torch.Tensor]
    input_splits: list[list[int]]
    input_tensors: list[torch.Tensor]
    labels: list[str]
    keys: list[str]
    device: torch.device
    stagger: int
    splits_cumsum: list[int]

    @classmethod
    def of(
        cls, pg: ProcessGroup, features: KeyedJaggedTensor, splits: Sequence[int], stagger: int = 1
    ) -> KJTSplitsAllToAllMeta:
        """Return the record of features whose next `splits[r]` keys go to rank r."""
        cumsum = [sum(splits[:rank]) for rank in range(len(splits) + 1)]
        input_splits = [list(part) for part in features.dist_splits(list(splits))]
        lists = list(input_splits)
        if not features.variable_stride_per_key():
            lists.append([features.stride()] * pg.size())
        rank = pg.rank()
        return cls(
            pg,
            features,
            list(splits),
            [torch.tensor(part) for part in lists],
            input_splits,
            features.dist_tensors(),
            features.dist_labels(),
            features.keys()[cumsum[rank] : cumsum[rank + 1]],
            features.device(),
            stagger,
            cumsum,
        )


def _tell_sizes(awaitable: Any, context: Any) -> None:
    """Put what an exchange of features learned into the context of its sharding."""
    received = getattr(awaitable, "received", None)
    if received is None:
        return
    named = {
        "input_splits": received.input_splits,
        "output_splits": received.output_splits,
        "sparse_features_recat": received.recat,
    }
    if received.stride_per_rank:
        named["batch_size_per_rank"] = received.stride_per_rank
    for name, value in named.items():
        if hasattr(context, name):
            setattr(context, name, value)


def _tell_batches(features: KeyedJaggedTensor, context: Any) -> None:
    if hasattr(context, "batch_size_per_rank_per_feature") and features.variable_stride_per_key():
        strides = features.stride_per_key_per_rank()
        context.batch_size_per_rank_per_feature = [list(ranks) for ranks in zip(*strides, strict=True)]


class KJTListAwaitable(Awaitable[KJTList]):
    """Hold the features of several shardings on their way; batch sizes go into the contexts of `ctx`."""

    def __init__(self, awaitables: list[Awaitable[KeyedJaggedTensor]], ctx: C) -> None:
        super().__init__()
        self.awaitables = awaitables
        self.ctx = ctx

    def _wait_impl(self) -> KJTList:
        features = [awaitable.wait() for awaitable in self.awaitables]
        contexts = getattr(self.ctx, "sharding_contexts", [])
        for feature, awaitable, context in zip(features, self.awaitables, contexts, strict=False):
            _tell_sizes(awaitable, context)
            _tell_batches(feature, context)
        return KJTList(features)


class KJTListSplitsAwaitable(Awaitable[Awaitable[KJTList]], Generic[C]):
    """Hold the sizes of several shardings' features on their way; waiting sends the features."""

    def __init__(self, awaitables: list[Awaitable[Awaitable[KeyedJaggedTensor]]], ctx: C) -> None:
        super().__init__()
        self.awaitables = awaitables
        self.ctx = ctx

    def _wait_impl(self) -> KJTListAwaitable:
        return KJTListAwaitable([awaitable.wait() for awaitable in self.awaitables], self.ctx)


class FusedKJTListSplitsAwaitable(Awaitable[list[KJTListAwaitable]]):
    """Tell the sizes of several modules' features in one message.

    Collective: the same requests in the same order on every rank. The awaitables of a request are
    KJTSplitsAllToAllMeta, which are sent together, or plain awaitables, which are waited for.
    """

    def __init__(
        self, requests: list[KJTListSplitsAwaitable[C]], contexts: list[C], pg: ProcessGroup | None
    ) -> None:
        super().__init__()
        self._requests = requests
        self._contexts = contexts
        metas = [
            (meta._input._engine(), meta.splits, meta.stagger)
            for request in requests
            for meta in request.awaitables
            if isinstance(meta, KJTSplitsAllToAllMeta)
        ]
        if metas and pg is None:
            raise ValueError("sharding.fused_splits: there are features to send and no group.")
        self._pending = _C.dist_data.fused_kjt_alltoall(metas, pg) if metas else None

    def _wait_impl(self) -> list[KJTListAwaitable]:
        sent = iter(self._pending.wait() if self._pending is not None else [])
        lists = []
        for request, context in zip(self._requests, self._contexts, strict=True):
            awaitables = [
                KJTAllToAllTensorsAwaitable(next(sent))
                if isinstance(awaitable, KJTSplitsAllToAllMeta)
                else awaitable.wait()
                for awaitable in request.awaitables
            ]
            lists.append(KJTListAwaitable(awaitables, context))
        return lists


class ListOfKJTListAwaitable(Awaitable[ListOfKJTList]):
    """Hold several lists of features on their way."""

    def __init__(self, awaitables: list[Awaitable[KJTList]]) -> None:
        super().__init__()
        self.awaitables = awaitables

    def _wait_impl(self) -> ListOfKJTList:
        return ListOfKJTList([awaitable.wait() for awaitable in self.awaitables])


class ListOfKJTListSplitsAwaitable(Awaitable[Awaitable[ListOfKJTList]]):
    """Hold the sizes of several lists of features on their way."""

    def __init__(self, awaitables: list[Awaitable[Awaitable[KJTList]]]) -> None:
        super().__init__()
        self.awaitables = awaitables

    def _wait_impl(self) -> ListOfKJTListAwaitable:
        return ListOfKJTListAwaitable([awaitable.wait() for awaitable in self.awaitables])


class BaseSparseFeaturesDist(abc.ABC, nn.Module, Generic[F]):
    """Send features to the ranks that own their tables."""

    @abc.abstractmethod
    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[F]] | F:
        """Start sending."""


class BaseEmbeddingDist(abc.ABC, nn.Module, Generic[C, T, W]):
    """Send rows to the ranks that own the samples."""

    @abc.abstractmethod
    def forward(self, local_embs: T, sharding_ctx: C | None = None) -> Awaitable[W] | W:
        """Start sending."""


class EmbeddingSharding(abc.ABC, Generic[C, F, T, W], FeatureShardingMixIn):
    """Say how the tables of one type of sharding are reached."""

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        self._qcomm_codecs_registry = qcomm_codecs_registry

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs] | None:
        """Return the codecs by the names of CommOp."""
        return self._qcomm_codecs_registry

    @abc.abstractmethod
    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist[F]:
        """Return what sends the features."""

    @abc.abstractmethod
    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[F, T]:
        """Return what looks up the rows."""

    @abc.abstractmethod
    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist[C, T, W]:
        """Return what sends the rows home."""

    @abc.abstractmethod
    def embedding_dims(self) -> list[int]:
        """Return the columns of each output."""

    @abc.abstractmethod
    def embedding_names(self) -> list[str]:
        """Return the names of the outputs."""

    @abc.abstractmethod
    def embedding_names_per_rank(self) -> list[list[str]]:
        """Return the names of each rank's outputs."""

    @abc.abstractmethod
    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """Return where the rows of each output lie in their table."""

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """Return the tables of this rank."""
        raise NotImplementedError

    def uncombined_embedding_dims(self) -> list[int]:
        """Return the columns of each output before parts of one table are put together."""
        return self.embedding_dims()

    def uncombined_embedding_names(self) -> list[str]:
        """Return the names of the outputs before parts of one table are put together."""
        return self.embedding_names()
