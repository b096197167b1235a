"""Rows of tables over the ranks of one host."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from tessera.distributed.comm import get_local_size, intra_and_cross_node_pg
from tessera.distributed.dist_data import KJTAllToAll, PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter
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
from tessera.distributed.sharding.rw_sharding import row_starts
from tessera.distributed.types import Awaitable, CommOp, QuantizedCommCodecs, ShardingEnv
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "BaseTwRwEmbeddingSharding",
    "TwRwPooledEmbeddingDist",
    "TwRwPooledEmbeddingSharding",
    "TwRwSparseFeaturesDist",
]


class TwRwSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Send every id to the rank of its table's host that has its row. Collective.

    `features_per_host` are sent to each host; `starts` says for each of them where the rows of the host's
    ranks begin, and where the last ends. The samples of a feature arrive by local rank, then by host.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        features_per_host: list[int],
        starts: list[list[int]],
        local_size: int,
        sends_positions: bool = False,
    ) -> None:
        super().__init__()
        self._local_size = local_size
        self._starts = [torch.tensor(each) for each in starts]
        self._sends_positions = sends_positions
        total = sum(features_per_host)
        firsts = [sum(features_per_host[:host]) for host in range(len(features_per_host))]
        self._order = [
            bucket * total + first + place
            for first, count in zip(firsts, features_per_host, strict=True)
            for bucket in range(local_size)
            for place in range(count)
        ]
        splits = [count for count in features_per_host for _ in range(local_size)]
        self._dist = KJTAllToAll(pg, splits, stagger=len(features_per_host))

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Start sending."""
        spread, _ = bucketize_kjt_before_all2all(
            sparse_features,
            self._local_size,
            torch.zeros(len(self._starts), dtype=torch.int64),
            bucketize_pos=self._sends_positions,
            block_bucketize_row_pos=self._starts,
        )
        return self._dist(spread.permute(self._order))


class TwRwPooledEmbeddingDist(BaseEmbeddingDist[EmbeddingShardingContext, torch.Tensor, torch.Tensor]):
    """Sum the rows inside their host, and send the sums to the hosts of the samples. Collective."""

    def __init__(
        self,
        rank: int,
        intra_pg: ProcessGroup,
        cross_pg: ProcessGroup,
        dim_sum_per_host: list[int],
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
        intra_codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._local_size = intra_pg.size()
        self._local_rank = rank % self._local_size
        self._num_hosts = cross_pg.size()
        self._intra = PooledEmbeddingsReduceScatter(intra_pg, intra_codecs)
        self._cross = PooledEmbeddingsAllToAll(cross_pg, dim_sum_per_host, device, codecs=codecs)

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        """Start sending; the sums inside the host are waited for."""
        if sharding_ctx is not None and sharding_ctx.variable_batch_per_feature:
            raise ValueError(
                "sharding.table_row_wise: batches vary per feature. Use ShardedEmbeddingBagCollection."
            )
        world = self._local_size * self._num_hosts
        if sharding_ctx is not None and sharding_ctx.batch_size_per_rank:
            batches = sharding_ctx.batch_size_per_rank
        else:
            batches = [local_embs.size(0) // world] * world
        by_local_rank = [batches[local :: self._local_size] for local in range(self._local_size)]
        summed = self._intra(local_embs, [sum(hosts) for hosts in by_local_rank]).wait()
        return self._cross(summed, by_local_rank[self._local_rank])


class BaseTwRwEmbeddingSharding(PartsSharding[C]):
    """Send ids to the host of their table, there to the rank of the row."""

    _sums_means = True

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        self._local_size = get_local_size(env.world_size)
        super().__init__(sharding_infos, env, device, qcomm_codecs_registry)
        self._intra_pg, self._cross_pg = intra_and_cross_node_pg(self._device)

    def _parts_of(self, info: EmbeddingShardingInfo) -> list[tuple[int, ShardedEmbeddingTable]]:
        by_rank = {shard.placement.rank(): shard for shard in shards_of(info)}
        columns = info.embedding_config.embedding_dim
        parts = []
        for rank in self._ranks_of(info):
            shard = by_rank.get(rank)
            rows = shard.shard_sizes[0] if shard is not None else 0
            parts.append((rank, part_of(info, rows, columns, shard, sums=True)))
        return parts

    def _ranks_of(self, info: EmbeddingShardingInfo) -> range:
        """Return the ranks of the table's host."""
        first = min(shard.placement.rank() for shard in shards_of(info))
        first -= first % self._local_size
        return range(first, first + self._local_size)

    # One entry per host: its ranks have the same features.
    def _senders(self) -> list[list[GroupedEmbeddingConfig]]:
        return self._groups_per_rank[:: self._local_size]

    def create_input_dist(self, device: torch.device | None = None) -> FeaturesDist:
        """Return what sends the features."""
        infos = {info.embedding_config.name: info for info in self._infos}
        tables = [table for groups in self._senders() for group in groups for table in group.embedding_tables]
        starts = [
            row_starts(infos[table.name], self._ranks_of(infos[table.name]))
            for table in tables
            for _ in table.feature_names
        ]
        return TwRwSparseFeaturesDist(
            self._pg,
            self.features_per_rank(),
            starts,
            self._local_size,
            any(table.has_feature_processor for table in tables),
        )


class TwRwPooledEmbeddingSharding(BaseTwRwEmbeddingSharding[EmbeddingShardingContext]):
    """Sum the rows of a bag over the ranks of a host; see `mean_factors` for means."""

    def create_output_dist(self, device: torch.device | None = None) -> EmbeddingDist:
        """Return what sends the rows home."""
        return TwRwPooledEmbeddingDist(
            self._env.rank,
            self._intra_pg,
            self._cross_pg,
            [sum(dims) for dims in self.embedding_dims_per_rank()],
            device or self._device,
            self._codecs(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL),
            self._codecs(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER),
        )
