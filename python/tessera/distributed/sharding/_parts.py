"""The types of sharding: where parts of tables lie, what sends ids to them, what sends rows home.

What a type does is data of its class: how a table is cut (`_cut`), whether rows are pooled (`_is_sequence`),
and whether rows stay inside a host (`_in_hosts`). The classes are in the modules of their types.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from tessera.distributed.comm import get_local_size, intra_and_cross_node_pg
from tessera.distributed.dist_data import (
    KJTAllToAll,
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from tessera.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from tessera.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    C,
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    bucketize_kjt_before_all2all,
    group_tables,
)
from tessera.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.distributed.sharding.sequence_sharding import SequenceEmbeddingDist, SequenceShardingContext
from tessera.distributed.types import Awaitable, CommOp, NoWait, QuantizedCommCodecs, ShardingEnv
from tessera.modules.embedding_configs import PoolingType
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

FeaturesDist = BaseSparseFeaturesDist[KeyedJaggedTensor]
PooledDist = BaseEmbeddingDist[EmbeddingShardingContext, torch.Tensor, torch.Tensor]
Pending = Awaitable[Awaitable[KeyedJaggedTensor]]


def shards_of(info: EmbeddingShardingInfo) -> list[ShardMetadata]:
    """Return where the parts of a table lie."""
    spec = info.param_sharding.sharding_spec
    if not isinstance(spec, EnumerableShardingSpec):
        raise ValueError(
            f"sharding.parts: the sharding of table {info.embedding_config.name!r} has no list of shards. "
            "Make it with construct_module_sharding_plan."
        )
    return spec.shards


def part_of(
    info: EmbeddingShardingInfo, rows: int, columns: int, shard: ShardMetadata | None, sums: bool = False
) -> ShardedEmbeddingTable:
    """Return the record of one part; with `sums` means are summed, and divided by whoever adds up."""
    config = info.embedding_config
    is_mean = config.pooling == PoolingType.MEAN
    return ShardedEmbeddingTable(
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        name=config.name,
        data_type=config.data_type,
        feature_names=list(config.feature_names),
        pooling=PoolingType.SUM if sums and is_mean else config.pooling,
        is_weighted=config.is_weighted,
        has_feature_processor=config.has_feature_processor,
        embedding_names=list(config.embedding_names),
        weight_init_max=config.weight_init_max,
        weight_init_min=config.weight_init_min,
        init_fn=config.init_fn,
        local_rows=rows,
        local_cols=columns,
        local_metadata=shard,
        compute_kernel=EmbeddingComputeKernel(info.param_sharding.compute_kernel),
        fused_params=info.fused_params,
    )


# ---- ids to their parts ----


class DpSparseFeaturesDist(FeaturesDist):
    """Leave the features here.

    >>> features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([3]), torch.tensor([1]))
    >>> DpSparseFeaturesDist()(features).wait().wait() is features
    True
    """

    def forward(self, sparse_features: KeyedJaggedTensor) -> Pending:
        """Return the features."""
        return NoWait(NoWait(sparse_features))


class TwSparseFeaturesDist(FeaturesDist):
    """Send the next `features_per_rank[r]` features to rank r. Collective."""

    def __init__(self, pg: ProcessGroup, features_per_rank: list[int]) -> None:
        super().__init__()
        self._dist = KJTAllToAll(pg, features_per_rank)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Pending:
        """Start sending."""
        return self._dist(sparse_features)


class TwRwSparseFeaturesDist(FeaturesDist):
    """Send every id to the rank of its table's host that has its row, as the number of the row there.

    Collective. `features_per_host` are sent to each host; `starts` says for each of them where the rows of
    the host's ranks begin, and where the last ends. The samples of a feature arrive by local rank, then by
    host. With `sends_positions` the weights that arrive are the places of the ids in their bags.
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
        self._is_sequence = False
        total, firsts = len(starts), [0, *itertools.accumulate(features_per_host)]
        self._order = [
            bucket * total + place
            for first, end in itertools.pairwise(firsts)
            for bucket in range(local_size)
            for place in range(first, end)
        ]
        splits = [count for count in features_per_host for _ in range(local_size)]
        self._dist = KJTAllToAll(pg, splits, stagger=len(features_per_host))
        self.unbucketize_permute_tensor: torch.Tensor | None = None

    def forward(self, sparse_features: KeyedJaggedTensor) -> Pending:
        """Start sending."""
        spread, self.unbucketize_permute_tensor = bucketize_kjt_before_all2all(
            sparse_features,
            self._local_size,
            torch.zeros(len(self._starts), dtype=torch.int64),
            output_permute=self._is_sequence,
            bucketize_pos=self._sends_positions,
            block_bucketize_row_pos=self._starts,
        )
        is_ordered = self._order == list(range(len(self._order)))
        return self._dist(spread if is_ordered else spread.permute(self._order))


class RwSparseFeaturesDist(TwRwSparseFeaturesDist):
    """Send every id to the rank that has its row: all ranks are one host. Collective.

    A sequence leaves in `unbucketize_permute_tensor` where each id of the last batch went.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        starts: list[list[int]],
        is_sequence: bool = False,
        sends_positions: bool = False,
    ) -> None:
        super().__init__(pg, [len(starts)], starts, pg.size(), sends_positions)
        self._is_sequence = is_sequence


# ---- rows home ----


class DpPooledEmbeddingDist(PooledDist):
    """Leave the rows here."""

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        """Return the rows."""
        return NoWait(local_embs)


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


class TwPooledEmbeddingDist(PooledDist):
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
        ctx = sharding_ctx
        if ctx is None or not ctx.variable_batch_per_feature:
            return self._dist(local_embs, ctx and ctx.batch_size_per_rank)
        return self._send_variable(local_embs, ctx)

    def _send_variable(self, rows: torch.Tensor, ctx: EmbeddingShardingContext) -> Awaitable[torch.Tensor]:
        return self._variable(rows, ctx.batch_size_per_rank_per_feature, ctx.batch_size_per_feature_pre_a2a)


class RwPooledEmbeddingDist(TwPooledEmbeddingDist):
    """Sum the ranks' rows, each rank for its own samples. Collective."""

    def __init__(
        self, pg: ProcessGroup, embedding_dims: list[int], codecs: QuantizedCommCodecs | None = None
    ) -> None:
        BaseEmbeddingDist.__init__(self)
        self._dims = embedding_dims
        self._dist = PooledEmbeddingsReduceScatter(pg, codecs)
        self._variable = VariableBatchPooledEmbeddingsReduceScatter(pg, codecs)

    def _send_variable(self, rows: torch.Tensor, ctx: EmbeddingShardingContext) -> Awaitable[torch.Tensor]:
        return self._variable(rows, ctx.batch_size_per_rank_per_feature, self._dims)


class TwRwPooledEmbeddingDist(PooledDist):
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


# ---- the types ----


class Cut(Enum):
    """How a table lies over the ranks."""

    COPIES = "whole on every rank: nothing travels"
    PARTS = "whole, or columns of it, on ranks: its features go to every part"
    ROWS = "rows over ranks: every id goes to its row, and sums come home"


class PartsSharding(EmbeddingSharding[C, KeyedJaggedTensor, torch.Tensor, torch.Tensor]):
    """Know which parts lie on which rank, in groups that are looked up together.

    Features go out in the order of `feature_names`: rank, group, table, feature. Rows come home in the
    order of `embedding_names`.
    """

    _cut = Cut.PARTS
    _in_hosts = False  # rows lie over the ranks of one host, not of all
    _is_sequence = False

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._env = env
        self._pg = env.process_group
        self._device = torch.device(device or "cpu")
        self._infos = sharding_infos
        # Ranks that are sent the same features: neighbours.
        self._span = get_local_size(env.world_size) if self._in_hosts else env.world_size
        if self._cut == Cut.PARTS:
            self._span = 1
        tables: list[list[ShardedEmbeddingTable]] = [[] for _ in range(env.world_size)]
        for info in sharding_infos:
            for rank, part in self._parts_of(info):
                tables[rank].append(part)
        self._groups_per_rank = group_tables(tables)
        if self._in_hosts:
            self._intra_pg, self._cross_pg = intra_and_cross_node_pg(self._device)

    def _parts_of(self, info: EmbeddingShardingInfo) -> list[tuple[int, ShardedEmbeddingTable]]:
        config = info.embedding_config
        if self._cut == Cut.COPIES:
            whole = part_of(info, config.num_embeddings, config.embedding_dim, None)
            return [(rank, whole) for rank in range(self._env.world_size)]
        if self._cut == Cut.PARTS:
            return [(s.placement.rank(), part_of(info, *s.shard_sizes, s)) for s in shards_of(info)]
        # A rank without rows of a table still has it, with none: so all of its neighbours have the same.
        by_rank = {shard.placement.rank(): shard for shard in shards_of(info)}
        parts = []
        for rank in self._ranks_of(info):
            rows = by_rank[rank].shard_sizes[0] if rank in by_rank else 0
            parts.append((rank, part_of(info, rows, config.embedding_dim, by_rank.get(rank), sums=True)))
        return parts

    def _ranks_of(self, info: EmbeddingShardingInfo) -> range:
        """Return the ranks that the rows of a table lie over."""
        first = min(shard.placement.rank() for shard in shards_of(info))
        first -= first % self._span
        return range(first, first + self._span)

    def _starts_of(self, info: EmbeddingShardingInfo) -> list[int]:
        """Return where the rows of each rank begin, and where the last ends; a rank may have none."""
        rows = {shard.placement.rank(): shard.shard_sizes[0] for shard in shards_of(info)}
        return [0, *itertools.accumulate(rows.get(rank, 0) for rank in self._ranks_of(info))]

    def _senders(self) -> list[list[GroupedEmbeddingConfig]]:
        """Return the groups of ranks that are sent to apart: neighbours have the same features."""
        return self._groups_per_rank[:: self._span]

    def _codecs(self, operation: CommOp) -> QuantizedCommCodecs | None:
        return (self.qcomm_codecs_registry or {}).get(operation.name)

    def create_input_dist(self, device: torch.device | None = None) -> FeaturesDist:
        """Return what sends the features."""
        if self._cut == Cut.COPIES:
            return DpSparseFeaturesDist()
        if self._cut == Cut.PARTS:
            return TwSparseFeaturesDist(self._pg, self.features_per_rank())
        infos = {info.embedding_config.name: info for info in self._infos}
        tables = [table for groups in self._senders() for group in groups for table in group.embedding_tables]
        starts = [self._starts_of(infos[table.name]) for table in tables for _ in table.feature_names]
        sends_positions = any(table.has_feature_processor for table in tables)
        if self._in_hosts:
            return TwRwSparseFeaturesDist(
                self._pg, self.features_per_rank(), starts, self._span, sends_positions
            )
        return RwSparseFeaturesDist(self._pg, starts, self._is_sequence, sends_positions)

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, torch.Tensor]:
        """Return what looks up this rank's parts."""
        groups = self._groups_per_rank[self._env.rank]
        device = device or self._device
        if self._is_sequence:
            return GroupedEmbeddingsLookup(groups, self._pg, device)
        is_divided = self._cut != Cut.COPIES  # gradients on their way
        return GroupedPooledEmbeddingsLookup(
            groups, device, self._pg, feature_processor, scale_weight_gradients=is_divided
        )

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[C, torch.Tensor, torch.Tensor]:
        """Return what sends the rows home."""
        device = device or self._device
        if self._is_sequence:
            return self._sequence_dist(device)
        if self._cut == Cut.COPIES:
            return DpPooledEmbeddingDist()
        sums = self._codecs(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
        if self._cut == Cut.ROWS and not self._in_hosts:
            return RwPooledEmbeddingDist(self._pg, self.embedding_dims(), sums)
        dims = self.embedding_dims_per_rank()
        columns = [sum(each) for each in dims]
        codecs = self._codecs(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL)
        if self._in_hosts:
            return TwRwPooledEmbeddingDist(
                self._env.rank, self._intra_pg, self._cross_pg, columns, device, codecs, sums
            )
        return TwPooledEmbeddingDist(self._pg, columns, dims, device, self._callbacks(), codecs)

    def _sequence_dist(
        self, device: torch.device
    ) -> BaseEmbeddingDist[SequenceShardingContext, torch.Tensor, torch.Tensor]:
        dims = sorted(set(self.embedding_dims()))  # they travel in one exchange
        if len(dims) > 1:
            raise ValueError(f"sharding.sequence: the parts have {dims} columns; they must have the same.")
        dim = dims[0] if dims else 0
        if self._cut == Cut.COPIES:
            return DpSequenceEmbeddingDist(dim)
        features = [count for count in self.features_per_rank() for _ in range(self._span)]
        codecs = self._codecs(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)
        return SequenceEmbeddingDist(self._pg, features, dim, device, codecs)

    def _callbacks(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        return []

    def _per_rank(self, of_group: Callable[[GroupedEmbeddingConfig], list]) -> list[list]:
        return [[each for group in groups for each in of_group(group)] for groups in self._senders()]

    def feature_names(self) -> list[str]:
        """Return the features in the order they are sent."""
        return list(itertools.chain(*self.feature_names_per_rank()))

    def feature_names_per_rank(self) -> list[list[str]]:
        """Return the features of each rank that is sent to."""
        return self._per_rank(GroupedEmbeddingConfig.feature_names)

    def features_per_rank(self) -> list[int]:
        """Return the number of features of each rank that is sent to."""
        return [len(names) for names in self.feature_names_per_rank()]

    def embedding_dims(self) -> list[int]:
        """Return the columns of each output."""
        return list(itertools.chain(*self.embedding_dims_per_rank()))

    def embedding_dims_per_rank(self) -> list[list[int]]:
        """Return the columns of each rank's outputs."""
        return self._per_rank(GroupedEmbeddingConfig.embedding_dims)

    def embedding_names(self) -> list[str]:
        """Return the names of the outputs."""
        return list(itertools.chain(*self.embedding_names_per_rank()))

    def embedding_names_per_rank(self) -> list[list[str]]:
        """Return the names of each rank's outputs."""
        return self._per_rank(GroupedEmbeddingConfig.embedding_names)

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """Return where the rows of each output lie in their table."""
        return list(itertools.chain(*self._per_rank(GroupedEmbeddingConfig.embedding_shard_metadata)))

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """Return the parts of this rank."""
        return [t for group in self._groups_per_rank[self._env.rank] for t in group.embedding_tables]

    def mean_factors(self, features: KeyedJaggedTensor) -> torch.Tensor | None:
        """Return what the outputs of this rank's samples are multiplied with; None if with nothing.

        Rows of one bag lie on several ranks in row-wise tables: they are summed, and those of mean tables
        divided by the number of ids at home. `features` are in the order of `feature_names`. Of variable
        batches the factors are flat, as the outputs are.
        """
        means = {
            name
            for info in self._infos
            for name in info.embedding_config.embedding_names
            if self._cut == Cut.ROWS and info.embedding_config.pooling == PoolingType.MEAN
        }
        if not means:
            return None
        lengths = features.lengths().split(features.stride_per_key())
        factors = []
        for own, name, dim in zip(lengths, self.embedding_names(), self.embedding_dims(), strict=True):
            counts = own.clamp(min=1) if name in means else torch.ones_like(own)
            factors.append(counts.reciprocal().unsqueeze(1).expand(-1, dim))
        if features.variable_stride_per_key():
            return torch.cat([each.reshape(-1) for each in factors])
        return torch.cat(factors, dim=1)
