"""Records of sharded tables, and what all sharded embedding modules share.

>>> table = ShardedEmbeddingTable(10, 4, "t", feature_names=["f", "g"], local_rows=10, local_cols=2)
>>> kernel = EmbeddingComputeKernel.FUSED
>>> group = GroupedEmbeddingConfig(table.data_type, table.pooling, False, False, kernel, [table])
>>> group.dim_sum(), group.embedding_dims(), group.feature_hash_sizes()
(4, [2, 2], [10, 10])
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata

from tessera.distributed.types import (
    ModuleSharder,
    QuantizedCommCodecs,
    ShardedModule,
    ShardingType,
    _quantised_size_bytes,
    _storage,
    get_tensor_size_bytes,
)
from tessera.modules.embedding_configs import DataType, EmbeddingTableConfig, PoolingType
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.streamable import Multistreamable

__all__ = [
    "BaseEmbeddingLookup",
    "BaseEmbeddingSharder",
    "BaseGroupedFeatureProcessor",
    "BaseQuantEmbeddingSharder",
    "EmbeddingAttributes",
    "EmbeddingComputeKernel",
    "EmbeddingLocation",
    "FeatureShardingMixIn",
    "GroupedEmbeddingConfig",
    "KJTList",
    "ListOfKJTList",
    "ModuleShardingMixIn",
    "OptimType",
    "ShardedConfig",
    "ShardedEmbeddingModule",
    "ShardedEmbeddingTable",
    "ShardedMetaConfig",
    "compute_kernel_to_embedding_location",
]

F = TypeVar("F")
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
Out = TypeVar("Out")
ShrdCtx = TypeVar("ShrdCtx")


@unique
class OptimType(Enum):
    """Name the rules that may step a table."""

    SGD = "SGD"
    LARS_SGD = "LARS_SGD"
    LAMB = "LAMB"
    PARTIAL_ROWWISE_LAMB = "PARTIAL_ROWWISE_LAMB"
    ADAM = "ADAM"
    PARTIAL_ROWWISE_ADAM = "PARTIAL_ROWWISE_ADAM"
    ADAGRAD = "ADAGRAD"
    ROWWISE_ADAGRAD = "ROWWISE_ADAGRAD"
    SHAMPOO = "SHAMPOO"
    SHAMPOO_V2 = "SHAMPOO_V2"
    LION = "LION"
    ADAMW = "ADAMW"


@unique
class EmbeddingComputeKernel(Enum):
    """Say what backward does with a table's rows, and in which memory they lie."""

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"
    QUANT = "quant"
    QUANT_UVM = "quant_uvm"
    QUANT_UVM_CACHING = "quant_uvm_caching"


@unique
class EmbeddingLocation(Enum):
    """Say in which memory the rows of a table lie."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3


def compute_kernel_to_embedding_location(compute_kernel: EmbeddingComputeKernel) -> EmbeddingLocation:
    """Return where the rows of a kernel lie.

    >>> compute_kernel_to_embedding_location(EmbeddingComputeKernel.FUSED_UVM)
    <EmbeddingLocation.MANAGED: 1>
    """
    if compute_kernel.value.endswith("_uvm_caching"):
        return EmbeddingLocation.MANAGED_CACHING
    if compute_kernel.value.endswith("_uvm"):
        return EmbeddingLocation.MANAGED
    return EmbeddingLocation.DEVICE


class _Streams(Multistreamable, Generic[T]):
    """A list of things that know streams."""

    def __init__(self, features: list[T]) -> None:
        self.features = features

    def __len__(self) -> int:
        return len(self.features)

    def __setitem__(self, key: int, item: T) -> None:
        self.features[key] = item

    def __getitem__(self, key: int) -> T:
        return self.features[key]

    def __iter__(self) -> Iterator[T]:
        return iter(self.features)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all features until `stream` has used them."""
        for feature in self.features:
            feature.record_stream(stream)


class KJTList(_Streams[KeyedJaggedTensor]):
    """Hold the features of several shardings, or devices."""


class ListOfKJTList(_Streams[KJTList]):
    """Hold several lists of features."""


@dataclass
class ShardedConfig:
    """Say how large the part of a table on this rank is."""

    local_rows: int = 0
    local_cols: int = 0


@dataclass
class ShardedMetaConfig(ShardedConfig):
    """Say besides where it lies in the table."""

    local_metadata: ShardMetadata | None = None
    global_metadata: ShardedTensorMetadata | None = None


@dataclass
class EmbeddingAttributes:
    """Say what computes."""

    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.DENSE


@dataclass
class ShardedEmbeddingTable(ShardedMetaConfig, EmbeddingAttributes, EmbeddingTableConfig):
    """Describe the part of a table on this rank."""

    fused_params: dict[str, Any] | None = None


@dataclass
class GroupedEmbeddingConfig:
    """Describe tables that are looked up in one call."""

    data_type: DataType
    pooling: PoolingType
    is_weighted: bool
    has_feature_processor: bool
    compute_kernel: EmbeddingComputeKernel
    embedding_tables: list[ShardedEmbeddingTable]
    fused_params: dict[str, Any] | None = field(default=None)

    def feature_hash_sizes(self) -> list[int]:
        """Return the rows of each feature's table."""
        return [t.num_embeddings for t in self.embedding_tables for _ in t.feature_names]

    def num_features(self) -> int:
        """Return the number of features."""
        return sum(table.num_features() for table in self.embedding_tables)

    def dim_sum(self) -> int:
        """Return the columns of all features."""
        return sum(table.num_features() * table.local_cols for table in self.embedding_tables)

    def table_names(self) -> list[str]:
        """Return the names of the tables."""
        return [table.name for table in self.embedding_tables]

    def feature_names(self) -> list[str]:
        """Return the features, table by table."""
        return [name for table in self.embedding_tables for name in table.feature_names]

    def embedding_dims(self) -> list[int]:
        """Return the columns of each feature."""
        return [t.local_cols for t in self.embedding_tables for _ in t.feature_names]

    def embedding_names(self) -> list[str]:
        """Return the names of the outputs, table by table."""
        return [name for table in self.embedding_tables for name in table.embedding_names]

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """Return where each feature's rows lie in their table."""
        return [t.local_metadata for t in self.embedding_tables for _ in t.feature_names]


class BaseEmbeddingLookup(abc.ABC, nn.Module, Generic[F, T]):
    """Look up the rows of features that are here."""

    @abc.abstractmethod
    def forward(self, sparse_features: F) -> T:
        """Return the rows."""


class BaseGroupedFeatureProcessor(nn.Module):
    """Change features before they are looked up."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the changed features."""


class FeatureShardingMixIn:
    """Say which features go to which rank."""

    def feature_names(self) -> list[str]:
        """Return the features in the order they are sent."""
        raise NotImplementedError

    def feature_names_per_rank(self) -> list[list[str]]:
        """Return the features of each rank."""
        raise NotImplementedError

    def features_per_rank(self) -> list[int]:
        """Return the number of features of each rank."""
        raise NotImplementedError


class ModuleShardingMixIn:
    """Say how a module is sharded."""

    @property
    def shardings(self) -> dict[str, FeatureShardingMixIn]:
        """Return the shardings of the module by type."""
        raise NotImplementedError


class ShardedEmbeddingModule(ShardedModule[CompIn, DistOut, Out, ShrdCtx], ModuleShardingMixIn):
    """Do what all sharded embedding modules do."""

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__(qcomm_codecs_registry)
        self._input_dists: list[nn.Module] = []
        self._lookups: list[nn.Module] = []
        self._output_dists: list[nn.Module] = []

    def prefetch(
        self, dist_input: KJTList, forward_stream: torch.Stream | None = None, ctx: Any | None = None
    ) -> None:
        """Bring rows nearer before they are looked up, where a lookup knows how."""
        for feature, lookup in zip(dist_input, self._lookups, strict=False):
            while isinstance(lookup, nn.parallel.DistributedDataParallel):
                lookup = lookup.module
            if hasattr(lookup, "prefetch"):
                lookup.prefetch(feature, forward_stream)

    def extra_repr(self) -> str:
        """Return the parts of the module, for people."""

        def block(modules: list[nn.Module], name: str) -> str:
            return f"({name}): " + ", ".join(repr(module) for module in modules)

        parts = {
            "lookups": self._lookups,
            "_input_dists": self._input_dists,
            "_output_dists": self._output_dists,
        }
        return "\n".join(block(modules, name) for name, modules in parts.items() if modules)


class _TableSharder(ModuleSharder[M]):
    """What the sharders of tables share: how rows are stepped, and what tables take."""

    _fused_params: dict[str, Any] | None = None
    _id_bytes_per_row = 0  # of what maps ids to rows

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """Return how rows are stepped, and further settings of the tables."""
        return self._fused_params

    def storage_usage(
        self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Return the bytes of a table; tables in managed memory lie in DDR."""
        kind = _storage(compute_device_type, compute_kernel)
        more = self._id_bytes_per_row
        rows = tensor.size(0) if more else 0
        return {kind.value: get_tensor_size_bytes(tensor) + more * rows}


class BaseEmbeddingSharder(_TableSharder[M]):
    """Know what all shardable collections of tables have in common.

    Every type of sharding is there on every device. `fused_params` says how rows are stepped: the keys of
    `tessera.distributed.utils.merge_fused_params`.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._fused_params = fused_params

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the types of sharding: all."""
        return [
            ShardingType.DATA_PARALLEL.value,
            ShardingType.TABLE_WISE.value,
            ShardingType.COLUMN_WISE.value,
            ShardingType.TABLE_COLUMN_WISE.value,
            ShardingType.ROW_WISE.value,
            ShardingType.TABLE_ROW_WISE.value,
            ShardingType.GRID_SHARD.value,
        ]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the kernels: dense for replicas, dense and fused for shards."""
        kernels = [EmbeddingComputeKernel.DENSE.value]
        if sharding_type != ShardingType.DATA_PARALLEL.value:
            kernels.append(EmbeddingComputeKernel.FUSED.value)
        return kernels


class BaseQuantEmbeddingSharder(_TableSharder[M]):
    """Know what all shardable collections of quantised tables have in common.

    `shardable_params` names the tables to shard, all if left out; a module of which only some are named
    cannot be sharded.
    """

    def __init__(
        self, fused_params: dict[str, Any] | None = None, shardable_params: list[str] | None = None
    ) -> None:
        super().__init__()
        self._fused_params = dict(fused_params) if fused_params else None
        self._shardable_params = list(shardable_params or [])

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the types of sharding: whole tables, rows or columns."""
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value, ShardingType.COLUMN_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the kernels; on CUDA also those whose rows lie in managed memory."""
        kernels = [EmbeddingComputeKernel.QUANT.value]
        if compute_device_type == "cuda":
            kernels += [
                EmbeddingComputeKernel.QUANT_UVM.value,
                EmbeddingComputeKernel.QUANT_UVM_CACHING.value,
            ]
        return kernels

    def storage_usage(
        self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Return the bytes of whole rows, with their scales and biases; `tensor` may be the codes alone."""
        return {_storage(compute_device_type, compute_kernel).value: _quantised_size_bytes(tensor)}

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Return the tables by name: what the state calls `<path>.<table>.weight`.

        Raises ValueError if `shardable_params` names some of the module's tables and not others.
        """
        tables = {
            name.split(".")[-2]: weight
            for name, weight in module.state_dict(keep_vars=True).items()
            if name.endswith(".weight")
        }
        if not self._shardable_params:
            return tables
        named = {name: weight for name, weight in tables.items() if name in self._shardable_params}
        if named and len(named) < len(tables):
            left = sorted(set(tables) - set(named))
            raise ValueError(f"sharding.quant: tables {left} of the module are not named; name all or none.")
        return named
