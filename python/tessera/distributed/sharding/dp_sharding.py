"""Whole tables on every rank: nothing travels."""

from __future__ import annotations

import torch

from tessera.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    C,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from tessera.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from tessera.distributed.sharding._parts import EmbeddingDist, FeaturesDist, PartsSharding, part_of
from tessera.distributed.types import Awaitable, NoWait
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "BaseDpEmbeddingSharding",
    "DpPooledEmbeddingDist",
    "DpPooledEmbeddingSharding",
    "DpSparseFeaturesDist",
]


class DpSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Leave the features here.

    >>> features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([3]), torch.tensor([1]))
    >>> DpSparseFeaturesDist()(features).wait().wait() is features
    True
    """

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Return the features."""
        return NoWait(NoWait(sparse_features))


class DpPooledEmbeddingDist(BaseEmbeddingDist[EmbeddingShardingContext, torch.Tensor, torch.Tensor]):
    """Leave the rows here."""

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        """Return the rows."""
        return NoWait(local_embs)


class BaseDpEmbeddingSharding(PartsSharding[C]):
    """Look up on the rank that has the samples; DistributedDataParallel averages the gradients."""

    def _parts_of(self, info: EmbeddingShardingInfo) -> list[tuple[int, ShardedEmbeddingTable]]:
        config = info.embedding_config
        return [
            (rank, part_of(info, config.num_embeddings, config.embedding_dim, None))
            for rank in range(self._env.world_size)
        ]

    def _senders(self) -> list[list[GroupedEmbeddingConfig]]:
        return self._groups_per_rank[:1]

    def _scales_weights(self) -> bool:
        return False  # nothing is divided on the way

    def create_input_dist(self, device: torch.device | None = None) -> FeaturesDist:
        """Return what leaves the features here."""
        return DpSparseFeaturesDist()


class DpPooledEmbeddingSharding(BaseDpEmbeddingSharding[EmbeddingShardingContext]):
    """Pool whole tables."""

    def create_output_dist(self, device: torch.device | None = None) -> EmbeddingDist:
        """Return what leaves the rows here."""
        return DpPooledEmbeddingDist()
