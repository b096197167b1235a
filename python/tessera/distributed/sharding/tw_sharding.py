"""Whole tables on ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from tessera.distributed.dist_data import (
    KJTAllToAll,
    PooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsAllToAll,
)
from tessera.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    C,
    EmbeddingShardingContext,
)
from tessera.distributed.sharding._parts import EmbeddingDist, FeaturesDist, PartsSharding
from tessera.distributed.types import Awaitable, CommOp, QuantizedCommCodecs
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "BaseTwEmbeddingSharding",
    "TwPooledEmbeddingDist",
    "TwPooledEmbeddingSharding",
    "TwSparseFeaturesDist",
]


class TwSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Send the next `features_per_rank[r]` features to rank r. Collective."""

    def __init__(self, pg: ProcessGroup, features_per_rank: list[int]) -> None:
        super().__init__()
        self._dist = KJTAllToAll(pg, features_per_rank)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Start sending."""
        return self._dist(sparse_features)


class TwPooledEmbeddingDist(BaseEmbeddingDist[EmbeddingShardingContext, torch.Tensor, torch.Tensor]):
    """Send pooled rows home: columns come in the order of the ranks. Collective.

    Batches are those of the context; without one they are even. Variable ones give flat rows: rank,
    feature, sample.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        dim_sum_per_rank: list[int],
        emb_dim_per_rank_per_feature: list[list[int]],
        device: torch.device | None = None,
        callbacks: list[Callable[[torch.Tensor], torch.Tensor]] | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._dist = PooledEmbeddingsAllToAll(pg, dim_sum_per_rank, device, callbacks, codecs)
        self._variable = VariableBatchPooledEmbeddingsAllToAll(
            pg, emb_dim_per_rank_per_feature, device, codecs=codecs
        )

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        """Start sending."""
        if sharding_ctx is None:
            return self._dist(local_embs)
        if not sharding_ctx.variable_batch_per_feature:
            return self._dist(local_embs, sharding_ctx.batch_size_per_rank)
        return self._variable(
            local_embs,
            sharding_ctx.batch_size_per_rank_per_feature,
            sharding_ctx.batch_size_per_feature_pre_a2a,
        )


class BaseTwEmbeddingSharding(PartsSharding[C]):
    """Send every feature to the one rank of its table."""

    def create_input_dist(self, device: torch.device | None = None) -> FeaturesDist:
        """Return what sends the features."""
        return TwSparseFeaturesDist(self._pg, self.features_per_rank())


class TwPooledEmbeddingSharding(BaseTwEmbeddingSharding[EmbeddingShardingContext]):
    """Pool whole tables on their ranks."""

    def create_output_dist(self, device: torch.device | None = None) -> EmbeddingDist:
        """Return what sends the rows home."""
        dims = self.embedding_dims_per_rank()
        return TwPooledEmbeddingDist(
            self._pg,
            [sum(each) for each in dims],
            dims,
            device or self._device,
            self._callbacks(),
            self._codecs(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL),
        )

    def _callbacks(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        return []
