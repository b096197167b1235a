"""What an embedding table is, before it has weights.

>>> config = EmbeddingBagConfig(num_embeddings=4, embedding_dim=8, name="t", feature_names=["f"])
>>> config.get_weight_init_max(), config.pooling
(0.5, <PoolingType.SUM: 'SUM'>)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, unique
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import torch

from tessera import _C
from tessera.types import DataType

if TYPE_CHECKING:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

__all__ = [
    "DATA_TYPE_NUM_BITS",
    "BaseEmbeddingConfig",
    "BoundsCheckMode",
    "DataType",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "EmbeddingTableConfig",
    "PoolingType",
    "QuantConfig",
    "ShardingType",
    "data_type_to_dtype",
    "data_type_to_sparse_type",
    "dtype_to_data_type",
    "pooling_type_to_pooling_mode",
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
class ShardingType(Enum):
    """Say how a table lies over the ranks."""

    DATA_PARALLEL = "data_parallel"  # whole on every rank
    TABLE_WISE = "table_wise"  # whole on one rank
    COLUMN_WISE = "column_wise"  # columns cut over ranks
    ROW_WISE = "row_wise"  # rows cut over all ranks
    TABLE_ROW_WISE = "table_row_wise"  # rows cut over the ranks of one host
    TABLE_COLUMN_WISE = "table_column_wise"  # columns cut over ranks of one host
    GRID_SHARD = "grid_shard"  # columns cut over hosts, and in a host rows over its ranks


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
    DataType.UINT8: 8,
    DataType.NFP8: 8,
    DataType.INT4: 4,
    DataType.INT2: 2,
}

_DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT64: torch.int64,
    DataType.INT32: torch.int32,
    DataType.INT8: torch.int8,
    DataType.UINT8: torch.uint8,
    DataType.INT4: torch.quint4x2,
    DataType.INT2: torch.quint2x4,
    DataType.NFP8: torch.float8_e4m3fn,
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
    if dtype in (torch.quint8, torch.qint8):
        return DataType.INT8
    raise ValueError(f"embed.config: no table has rows of {dtype}.")


def _fbgemm(module: str):
    """Return a module of fbgemm, which holds the enumerations that torchrec's names turn ours into."""
    try:
        return importlib.import_module(f"fbgemm_gpu.{module}")
    except ModuleNotFoundError as error:
        raise ImportError(
            "embed.config: fbgemm_gpu is not installed, whose enumeration is asked for. Tessera does without "
            "it: its own names are DataType and PoolingType."
        ) from error


def data_type_to_sparse_type(data_type: DataType) -> SparseType:
    """Return fbgemm's name of a data type, where fbgemm is installed."""
    names = {known: known.name for known in DATA_TYPE_NUM_BITS} | {DataType.UINT8: "INT8"}
    if data_type not in names:
        raise ValueError(f"embed.config: fbgemm has no rows of {data_type}.")
    return getattr(_fbgemm("split_embedding_configs").SparseType, names[data_type])


def pooling_type_to_pooling_mode(
    pooling_type: PoolingType, sharding_type: ShardingType | None = None
) -> PoolingMode:
    """Return fbgemm's name of a pooling, where fbgemm is installed.

    The parts of a bag whose table is cut by rows are summed, whatever is made of the sum.
    """
    cut_by_rows = getattr(sharding_type, "value", None) in ("row_wise", "table_row_wise")
    name = "SUM" if pooling_type == PoolingType.MEAN and cut_by_rows else pooling_type.value
    return getattr(_fbgemm("split_table_batched_embeddings_ops_common").PoolingMode, name)


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """Return torch's word for the pooling: "sum" or "mean"."""
    if pooling_type == PoolingType.NONE:
        raise ValueError("embed.config: pooling NONE has no word in torch.")
    return pooling_type.value.lower()


class _Typed(NamedTuple):
    dtype: torch.dtype


class QuantConfig(NamedTuple):
    """Say in which types rows and outputs are; what is called returns something with a `dtype`."""

    activation: Callable[[], _Typed]
    weight: Callable[[], _Typed]
    per_table_weight_dtype: dict[str, torch.dtype] | None = None

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        output_dtype: torch.dtype = torch.float32,
        per_table_weight_dtype: dict[str, torch.dtype] | None = None,
    ) -> QuantConfig:
        """Return the record of two types."""
        return cls(lambda: _Typed(output_dtype), lambda: _Typed(dtype), per_table_weight_dtype)


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
    if not hasattr(_C.embedding.DataType, config.data_type.value):
        raise ValueError(
            f"embed.config: table {config.name!r} would have rows of {config.data_type}. Tables that train "
            "have FP32, FP16 or BF16, quantised ones INT8, INT4 or INT2."
        )
    return _C.embedding.EmbeddingTableConfig(
        1 if config.num_embeddings is None else config.num_embeddings,  # a growing table begins with one row
        config.embedding_dim,
        config.name,
        getattr(_C.embedding.DataType, config.data_type.value),
        list(config.feature_names),
        getattr(_C.embedding.PoolingType, pooling.value),
    )
