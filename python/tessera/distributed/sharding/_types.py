"""Which class does which type of sharding."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessera.distributed.embedding_sharding import EmbeddingShardingInfo
from tessera.distributed.sharding._parts import PartsSharding
from tessera.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from tessera.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from tessera.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from tessera.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from tessera.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from tessera.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from tessera.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from tessera.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from tessera.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from tessera.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from tessera.distributed.types import QuantizedCommCodecs, ShardingEnv, ShardingType

POOLED: dict[str, type[PartsSharding]] = {
    ShardingType.DATA_PARALLEL.value: DpPooledEmbeddingSharding,
    ShardingType.TABLE_WISE.value: TwPooledEmbeddingSharding,
    ShardingType.ROW_WISE.value: RwPooledEmbeddingSharding,
    ShardingType.TABLE_ROW_WISE.value: TwRwPooledEmbeddingSharding,
    ShardingType.COLUMN_WISE.value: CwPooledEmbeddingSharding,
    ShardingType.TABLE_COLUMN_WISE.value: TwCwPooledEmbeddingSharding,
}
SEQUENCES: dict[str, type[PartsSharding]] = {
    ShardingType.DATA_PARALLEL.value: DpSequenceEmbeddingSharding,
    ShardingType.TABLE_WISE.value: TwSequenceEmbeddingSharding,
    ShardingType.COLUMN_WISE.value: CwSequenceEmbeddingSharding,
    ShardingType.ROW_WISE.value: RwSequenceEmbeddingSharding,
}


def make(
    types: Mapping[str, type[PartsSharding]],
    sharding_type: str,
    infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None,
    codecs: dict[str, QuantizedCommCodecs] | None,
    permute_embeddings: bool = False,
) -> PartsSharding:
    """Return the sharding of a type; those by column put parts together if `permute_embeddings`."""
    if sharding_type not in types:
        raise ValueError(f"sharding.create: {sharding_type!r} is not one of {', '.join(types)}.")
    kind = types[sharding_type]
    own = {"permute_embeddings": permute_embeddings} if issubclass(kind, CwPooledEmbeddingSharding) else {}
    return kind(infos, env, device, qcomm_codecs_registry=codecs, **own)
