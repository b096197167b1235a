"""Rows of single ids of whole tables on every rank."""

from __future__ import annotations

import torch

from tessera.distributed.embedding_sharding import BaseEmbeddingDist
from tessera.distributed.sharding._parts import EmbeddingDist, one_dim
from tessera.distributed.sharding.dp_sharding import BaseDpEmbeddingSharding
from tessera.distributed.sharding.sequence_sharding import SequenceShardingContext
from tessera.distributed.types import Awaitable, NoWait

__all__ = ["DpSequenceEmbeddingDist", "DpSequenceEmbeddingSharding"]


class DpSequenceEmbeddingDist(BaseEmbeddingDist[SequenceShardingContext, torch.Tensor, torch.Tensor]):
    """Leave the rows here."""

    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        self._dim = embedding_dim

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: SequenceShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        """Return the rows, which may be flat."""
        return NoWait(local_embs.view(-1, self._dim))


class DpSequenceEmbeddingSharding(BaseDpEmbeddingSharding[SequenceShardingContext]):
    """Look up rows on the rank that has the ids."""

    _is_sequence = True

    def create_output_dist(self, device: torch.device | None = None) -> EmbeddingDist:
        """Return what leaves the rows here."""
        return DpSequenceEmbeddingDist(one_dim(self.embedding_dims(), "sharding.sequence"))
