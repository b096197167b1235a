"""Rows of tables over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch.distributed import ProcessGroup

from tessera.distributed.dist_data import (
    KJTAllToAll,
    PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from tessera.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    C,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    bucketize_kjt_before_all2all,
)
from tessera.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from tessera.distributed.sharding._parts import EmbeddingDist, FeaturesDist, PartsSharding, part_of, shards_of
from tessera.distributed.types import Awaitable, CommOp, QuantizedCommCodecs
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "BaseRwEmbeddingSharding",
    "RwPooledEmbeddingDist",
    "RwPooledEmbeddingSharding",
    "RwSparseFeaturesDist",
]


def row_starts(info: EmbeddingShardingInfo, ranks: Iterable[int]) -> list[int]:
    """Return where the rows of each rank begin, and where the last ends; a rank may have none."""
    rows = {shard.placement.rank(): shard.shard_sizes[0] for shard in shards_of(info)}
    return [0, *itertools.accumulate(rows.get(rank, 0) for rank in ranks)]


class RwSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Send every id to the rank that has its row, as the number of the row there. Collective.

    `starts` says for each feature where the rows of the ranks begin, and where the last ends. A sequence
    leaves in `unbucketize_permute_tensor` where each id of the last batch went; with `sends_positions` the
    weights that arrive are the places of the ids in their bags.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        starts: list[list[int]],
        is_sequence: bool = False,
        sends_positions: bool = False,
    ) -> None:
        super().__init__()
        self._size = pg.size()
        self._starts = [torch.tensor(each) for each in starts]
        self._is_sequence = is_sequence
        self._sends_positions = sends_positions
        self._dist = KJTAllToAll(pg, [len(starts)] * pg.size())
        self.unbucketize_permute_tensor: torch.Tensor | None = None

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Start sending."""
        spread, self.unbucketize_permute_tensor = bucketize_kjt_before_all2all(
            sparse_features,
            self._size,
            torch.zeros(len(self._starts), dtype=torch.int64),
            output_permute=self._is_sequence,
            bucketize_pos=self._sends_positions,
            block_bucketize_row_pos=self._starts,
        )
        return self._dist(spread)


class RwPooledEmbeddingDist(BaseEmbeddingDist[EmbeddingShardingContext, torch.Tensor, torch.Tensor]):
    """Sum the ranks' rows, each rank for its own samples. Collective."""

    def __init__(
        self,
        pg: ProcessGroup,
        embedding_dims: list[int],
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._dims = embedding_dims
        self._dist = PooledEmbeddingsReduceScatter(pg, codecs)
        self._variable = VariableBatchPooledEmbeddingsReduceScatter(pg, codecs)

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        """Start sending."""
        if sharding_ctx is None:
            return self._dist(local_embs)
        if not sharding_ctx.variable_batch_per_feature:
            return self._dist(local_embs, sharding_ctx.batch_size_per_rank)
        return self._variable(local_embs, sharding_ctx.batch_size_per_rank_per_feature, self._dims)


class BaseRwEmbeddingSharding(PartsSharding[C]):
    """Send ids to the rows, on whichever rank they lie; all ranks have the same features."""

    _sums_means = True

    def _parts_of(self, info: EmbeddingShardingInfo) -> list[tuple[int, ShardedEmbeddingTable]]:
        # A rank without rows of a table still has it, with none: so all ranks have the same groups.
        by_rank = {shard.placement.rank(): shard for shard in shards_of(info)}
        columns = info.embedding_config.embedding_dim
        parts = []
        for rank in range(self._env.world_size):
            shard = by_rank.get(rank)
            rows = shard.shard_sizes[0] if shard is not None else 0
            parts.append((rank, part_of(info, rows, columns, shard, sums=True)))
        return parts

    def _senders(self) -> list[list[GroupedEmbeddingConfig]]:
        return self._groups_per_rank[:1]

    def create_input_dist(self, device: torch.device | None = None) -> FeaturesDist:
        """Return what sends the features."""
        infos = {info.embedding_config.name: info for info in self._infos}
        tables = [table for group in self._groups_per_rank[0] for table in group.embedding_tables]
        starts = [
            row_starts(infos[table.name], range(self._env.world_size))
            for table in tables
            for _ in table.feature_names
        ]
        return RwSparseFeaturesDist(
            self._pg, starts, self._is_sequence, any(table.has_feature_processor for table in tables)
        )


class RwPooledEmbeddingSharding(BaseRwEmbeddingSharding[EmbeddingShardingContext]):
    """Sum the rows of a bag over the ranks; see `mean_factors` for means."""

    def create_output_dist(self, device: torch.device | None = None) -> EmbeddingDist:
        """Return what sends the rows home."""
        codecs = self._codecs(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
        return RwPooledEmbeddingDist(self._pg, self.embedding_dims(), codecs)
