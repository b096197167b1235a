"""Rows of single ids of tables whose rows lie over all ranks."""

from __future__ import annotations

import torch

from tessera.distributed.sharding._parts import EmbeddingDist, one_dim
from tessera.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding
from tessera.distributed.sharding.sequence_sharding import SequenceEmbeddingDist, SequenceShardingContext
from tessera.distributed.types import CommOp

__all__ = ["RwSequenceEmbeddingSharding"]


class RwSequenceEmbeddingSharding(BaseRwEmbeddingSharding[SequenceShardingContext]):
    """Look up rows where they lie; they come home in the order of the ids.

    The context gets `unbucketize_permute_tensor` from the input dist.
    """

    _is_sequence = True

    def create_output_dist(self, device: torch.device | None = None) -> EmbeddingDist:
        """Return what sends the rows home."""
        return SequenceEmbeddingDist(
            self._pg,
            self.features_per_rank() * self._env.world_size,
            one_dim(self.embedding_dims(), "sharding.sequence"),
            device or self._device,
            self._codecs(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL),
        )
