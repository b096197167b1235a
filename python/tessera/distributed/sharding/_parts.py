"""Parts of tables by rank: what all types of sharding are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from tessera.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from tessera.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    C,
    EmbeddingSharding,
    EmbeddingShardingInfo,
    group_tables,
)
from tessera.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.distributed.types import CommOp, QuantizedCommCodecs, ShardingEnv
from tessera.modules.embedding_configs import PoolingType
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

FeaturesDist = BaseSparseFeaturesDist[KeyedJaggedTensor]
Lookup = BaseEmbeddingLookup[KeyedJaggedTensor, torch.Tensor]
EmbeddingDist = BaseEmbeddingDist[C, torch.Tensor, torch.Tensor]


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


class PartsSharding(EmbeddingSharding[C, KeyedJaggedTensor, torch.Tensor, torch.Tensor]):
    """Know which parts lie on which rank, in groups that are looked up together.

    Features go out in the order of `feature_names`: rank, group, table, feature. Rows come home in the
    order of `embedding_names`.
    """

    _sums_means = False  # rows of one table lie on several ranks
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
        tables: list[list[ShardedEmbeddingTable]] = [[] for _ in range(env.world_size)]
        for info in sharding_infos:
            for rank, part in self._parts_of(info):
                tables[rank].append(part)
        self._groups_per_rank = group_tables(tables)

    def _parts_of(self, info: EmbeddingShardingInfo) -> list[tuple[int, ShardedEmbeddingTable]]:
        return [
            (shard.placement.rank(), part_of(info, *shard.shard_sizes, shard, self._sums_means))
            for shard in shards_of(info)
        ]

    # Ranks whose features are sent apart; ranks that share a table get its features together.
    def _senders(self) -> list[list[GroupedEmbeddingConfig]]:
        return self._groups_per_rank

    def _codecs(self, operation: CommOp) -> QuantizedCommCodecs | None:
        return (self.qcomm_codecs_registry or {}).get(operation.name)

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> Lookup:
        """Return what looks up this rank's parts."""
        groups = self._groups_per_rank[self._env.rank]
        device = device or self._device
        if self._is_sequence:
            return GroupedEmbeddingsLookup(groups, self._pg, device)
        return GroupedPooledEmbeddingsLookup(
            groups, device, self._pg, feature_processor, scale_weight_gradients=self._scales_weights()
        )

    def _scales_weights(self) -> bool:
        return True

    def feature_names(self) -> list[str]:
        """Return the features in the order they are sent."""
        return [name for names in self.feature_names_per_rank() for name in names]

    def feature_names_per_rank(self) -> list[list[str]]:
        """Return the features of each rank that is sent to."""
        return [[name for group in groups for name in group.feature_names()] for groups in self._senders()]

    def features_per_rank(self) -> list[int]:
        """Return the number of features of each rank that is sent to."""
        return [len(names) for names in self.feature_names_per_rank()]

    def embedding_dims(self) -> list[int]:
        """Return the columns of each output."""
        return [dim for dims in self.embedding_dims_per_rank() for dim in dims]

    def embedding_dims_per_rank(self) -> list[list[int]]:
        """Return the columns of each rank's outputs."""
        return [[dim for group in groups for dim in group.embedding_dims()] for groups in self._senders()]

    def embedding_names(self) -> list[str]:
        """Return the names of the outputs."""
        return [name for names in self.embedding_names_per_rank() for name in names]

    def embedding_names_per_rank(self) -> list[list[str]]:
        """Return the names of each rank's outputs."""
        return [[name for group in groups for name in group.embedding_names()] for groups in self._senders()]

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """Return where the rows of each output lie in their table."""
        return [
            metadata
            for groups in self._senders()
            for group in groups
            for metadata in group.embedding_shard_metadata()
        ]

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
            if self._sums_means and info.embedding_config.pooling == PoolingType.MEAN
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


def one_dim(dims: Sequence[int], operation: str) -> int:
    """Return the columns of all rows, which must be the same: sequences travel in one exchange."""
    if len(set(dims)) > 1:
        raise ValueError(f"{operation}: the parts have {sorted(set(dims))} columns; they must have the same.")
    return dims[0] if dims else 0
