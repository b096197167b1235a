"""Rows of single ids of whole tables on ranks."""

from __future__ import annotations

import torch

from tessera.distributed.sharding._parts import EmbeddingDist, one_dim
from tessera.distributed.sharding.sequence_sharding import SequenceEmbeddingDist, SequenceShardingContext
from tessera.distributed.sharding.tw_sharding import BaseTwEmbeddingSharding
from tessera.distributed.types import CommOp

__all__ = ["TwSequenceEmbeddingSharding"]


class TwSequenceEmbeddingSharding(BaseTwEmbeddingSharding[SequenceShardingContext]):
    """Look up rows on the rank of their table; all tables have the same number of columns."""

    _is_sequence = True

    def create_output_dist(self, device: torch.device | None = None) -> EmbeddingDist:
        """Return what sends the rows home."""
        dims = [dim for dims in self.embedding_dims_per_rank() for dim in dims]
        return SequenceEmbeddingDist(
            self._pg,
            self.features_per_rank(),
            one_dim(dims, "sharding.sequence"),
            device or self._device,
            self._codecs(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL),
        )
