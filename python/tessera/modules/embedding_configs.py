"""What an embedding table is, before it has weights.

>>> config = EmbeddingBagConfig(num_embeddings=4, embedding_dim=8, name="t", feature_names=["f"])
>>> config.get_weight_init_max(), config.pooling
(0.5, <PoolingType.SUM: 'SUM'>)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, unique
from functools import partial
from math import sqrt

import torch

from tessera import _C

__all__ = [
    "DATA_TYPE_NUM_BITS",
    "BaseEmbeddingConfig",
    "BoundsCheckMode",
    "DataType",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "EmbeddingTableConfig",
    "PoolingType",
    "data_type_to_dtype",
    "dtype_to_data_type",
    "pooling_type_to_str",
]


@unique
class PoolingType(Enum):
    """Say what happens to the rows of a bag.

    The mean is the (weighted) sum divided by the number of ids, everywhere. An empty bag is zero.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


@unique
class DataType(Enum):
    """Say how the numbers of a row are stored. Rows that train are FP32, FP16 or BF16."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "INT8"
    INT4 = "INT4"
    INT2 = "INT2"

    def __str__(self) -> str:
        return self.value


@unique
class BoundsCheckMode(Enum):
    """Say what happens to an id outside its table.

    FATAL raises IndexError that names feature, sample and id. WARNING reads row 0 instead and says so
    once. IGNORE reads row 0 silently.
    """

    FATAL = "FATAL"
    WARNING = "WARNING"
    IGNORE = "IGNORE"


DATA_TYPE_NUM_BITS: dict[DataType, int] = {
    DataType.FP32: 32,
    DataType.FP16: 16,
    DataType.BF16: 16,
    DataType.INT8: 8,
    DataType.INT4: 4,
    DataType.INT2: 2,
}

_DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT8: torch.int8,
    DataType.INT4: torch.quint4x2,
    DataType.INT2: torch.quint2x4,
}


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """Return torch's type for the numbers of a row."""
    return _DTYPES[data_type]


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """Return the data type of rows held in `dtype`.

    >>> dtype_to_data_type(torch.half)
    <DataType.FP16: 'FP16'>
    """
    for data_type, candidate in _DTYPES.items():
        if candidate == dtype:
            return data_type
    if dtype in (torch.uint8, torch.quint8, torch.qint8):
        return DataType.INT8
    raise ValueError(f"embed.config: no table has rows of {dtype}.")


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """Return torch's word for the pooling: "sum" or "mean"."""
    if pooling_type == PoolingType.NONE:
        raise ValueError("embed.config: pooling NONE has no word in torch.")
    return pooling_type.value.lower()


@dataclass
class BaseEmbeddingConfig:
    """Describe one table. `feature_names` are the keys that look up in it; none means `name`.

    A table whose `num_embeddings` is None grows with its ids; it stands behind a
    `GrowingManagedCollisionModule`. `init_fn` fills a new table in place; by default with uniform numbers
    between the bounds, which are plus and minus sqrt(1 / num_embeddings) unless given.
    """

    num_embeddings: int | None
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    need_pos: bool = False

    def __post_init__(self) -> None:
        if self.init_fn is None and self.num_embeddings is not None and self.num_embeddings > 0:
            self.init_fn = partial(
                torch.nn.init.uniform_, a=self.get_weight_init_min(), b=self.get_weight_init_max()
            )

    def get_weight_init_max(self) -> float:
        """Return the upper bound of the first weights."""
        return sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Return the lower bound of the first weights."""
        return -sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Return the number of features that look up in the table."""
        return len(self.feature_names)


@dataclass
class EmbeddingTableConfig(BaseEmbeddingConfig):
    """Describe one table, pooled or not."""

    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    has_feature_processor: bool = False
    embedding_names: list[str] = field(default_factory=list)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """Describe one table whose rows are pooled."""

    pooling: PoolingType = PoolingType.SUM


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """Describe one table whose rows stay apart."""


def _to_engine(config: BaseEmbeddingConfig) -> _C.embedding.EmbeddingTableConfig:
    pooling = getattr(config, "pooling", PoolingType.NONE)
    return _C.embedding.EmbeddingTableConfig(
        1 if config.num_embeddings is None else config.num_embeddings,  # a growing table begins with one row
        config.embedding_dim,
        config.name,
        getattr(_C.embedding.DataType, config.data_type.value),
        list(config.feature_names),
        getattr(_C.embedding.PoolingType, pooling.value),
    )
