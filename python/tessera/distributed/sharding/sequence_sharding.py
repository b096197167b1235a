"""Rows of single ids: what one batch keeps, and the exchange that brings them home."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from tessera.distributed.dist_data import SequenceEmbeddingsAllToAll
from tessera.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from tessera.distributed.types import Awaitable, QuantizedCommCodecs
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["SequenceEmbeddingDist", "SequenceShardingContext"]


@dataclass
class SequenceShardingContext(EmbeddingShardingContext):
    """Keep where the ids of one batch went, from the features to the rows.

    `KJTListSplitsAwaitable` and `KJTListAwaitable` fill in the splits and the order of what arrived.
    """

    features_before_input_dist: KeyedJaggedTensor | None = None
    input_splits: list[int] = field(default_factory=list)
    output_splits: list[int] = field(default_factory=list)
    sparse_features_recat: torch.Tensor | None = None
    unbucketize_permute_tensor: torch.Tensor | None = None
    lengths_after_input_dist: torch.Tensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until `stream` has used them."""
        for part in (
            self.features_before_input_dist,
            self.sparse_features_recat,
            self.unbucketize_permute_tensor,
            self.lengths_after_input_dist,
        ):
            if part is not None:
                part.record_stream(stream)


class SequenceEmbeddingDist(BaseEmbeddingDist[SequenceShardingContext, torch.Tensor, torch.Tensor]):
    """Send rows back to the ranks that sent the ids, in the order they were sent. Collective."""

    def __init__(
        self,
        pg: ProcessGroup,
        features_per_rank: list[int],
        embedding_dim: int,
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._dim = embedding_dim
        self._dist = SequenceEmbeddingsAllToAll(pg, features_per_rank, device, codecs)

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: SequenceShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        """Start sending the rows, which may be flat."""
        if sharding_ctx is None or sharding_ctx.lengths_after_input_dist is None:
            raise ValueError("sharding.sequence: the context does not say which ids have arrived.")
        return self._dist(
            local_embs.view(-1, self._dim),
            sharding_ctx.lengths_after_input_dist,
            sharding_ctx.input_splits,
            sharding_ctx.output_splits,
            sharding_ctx.unbucketize_permute_tensor,
            sharding_ctx.batch_size_per_rank,
            sharding_ctx.sparse_features_recat,
        )
