"""Shards, ways to cut a table, and what is asked of one."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from tessera.distributed.planner._machines import Perf, Storage
from tessera.distributed.planner.constants import POOLING_FACTOR
from tessera.distributed.types import BoundsCheckMode, CacheParams, DataType


@dataclass
class Shard:
    """Part of a table: its size, where it begins, what it costs and on which rank it lies."""

    size: list[int]
    offset: list[int]
    storage: Storage | None = None
    perf: Perf | None = None
    rank: int | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.size), tuple(self.offset), self.storage, self.perf, self.rank))


class ShardingOption:
    """One way to cut one table."""

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        module: tuple[str, nn.Module],
        input_lengths: list[float],
        batch_size: int,
        sharding_type: str,
        partition_by: str,
        compute_kernel: str,
        shards: list[Shard],
        cache_params: CacheParams | None = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: BoundsCheckMode | None = None,
        dependency: str | None = None,
        is_pooled: bool | None = None,
        feature_names: list[str] | None = None,
        output_dtype: DataType | None = None,
        key_value_params: Any = None,
        num_poolings: list[float] | None = None,
    ) -> None:
        self.name = name
        self._tensor = tensor
        self._module = module
        self.input_lengths = input_lengths
        self.batch_size = batch_size
        self.sharding_type = sharding_type
        self.partition_by = partition_by
        self.compute_kernel = compute_kernel
        self.shards = shards
        self.cache_params = cache_params
        self.enforce_hbm = enforce_hbm
        self.stochastic_rounding = stochastic_rounding
        self.bounds_check_mode = bounds_check_mode
        self.dependency = dependency
        self._is_pooled = is_pooled
        self.feature_names = feature_names
        self.output_dtype = output_dtype
        self.key_value_params = key_value_params
        self.num_poolings = num_poolings
        weighted = getattr(module[1], "is_weighted", None)
        self.is_weighted: bool | None = bool(weighted()) if callable(weighted) else None

    @property
    def tensor(self) -> torch.Tensor:
        """Return the table."""
        return self._tensor

    @property
    def module(self) -> tuple[str, nn.Module]:
        """Return the path of the table's module, and the module."""
        return self._module

    @property
    def path(self) -> str:
        """Return the path of the table's module."""
        return self._module[0]

    @property
    def fqn(self) -> str:
        """Return the path of the table."""
        return f"{self._module[0]}.{self.name}"

    @property
    def num_shards(self) -> int:
        """Return the number of shards."""
        return len(self.shards)

    @property
    def num_inputs(self) -> int:
        """Return the number of features."""
        return len(self.input_lengths)

    @property
    def total_storage(self) -> Storage:
        """Return what all shards need."""
        return sum((shard.storage or Storage(0, 0) for shard in self.shards), Storage(0, 0))

    @property
    def total_perf(self) -> float:
        """Return the milliseconds of all shards."""
        return sum(shard.perf.total for shard in self.shards if shard.perf is not None)

    @property
    def is_pooled(self) -> bool:
        """Return whether bags are pooled, or every id has its row."""
        return True if self._is_pooled is None else self._is_pooled

    @property
    def cache_load_factor(self) -> float | None:
        """Return the share of the table that its cache holds, if something says so."""
        return None if self.cache_params is None else self.cache_params.load_factor

    @property
    def module_type_key(self) -> str:
        """Return the name of the module's type, by which sharders are looked up."""
        kind = type(self._module[1])
        return f"{kind.__module__}.{kind.__name__}"

    def get_shards_assignment(self) -> list[int | None]:
        """Return the ranks of the shards."""
        return [shard.rank for shard in self.shards]

    def storage_hash(self) -> int:
        """Return a number that is the same for the same cut of the same table, in every process."""
        text = f"{self.fqn}|{self.sharding_type}|{self.compute_kernel}|{self.cache_load_factor}|"
        digest = hashlib.blake2b(f"{text}{self.num_shards}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, byteorder="big")

    def __hash__(self) -> int:
        return hash(
            (self.fqn, self.sharding_type, self.compute_kernel, tuple(self.shards), self.cache_params)
        )

    def __eq__(self, other: object) -> bool:
        return self is other

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingOption:
        # The table and its module are what the option is about, not part of it.
        copied = copy.copy(self)
        copied.shards = copy.deepcopy(self.shards, memo)
        copied.cache_params = copy.copy(self.cache_params)
        copied.input_lengths = list(self.input_lengths)
        return copied

    def __repr__(self) -> str:
        ranks = [shard.rank for shard in self.shards]
        return f"ShardingOption({self.fqn}, {self.sharding_type}, {self.compute_kernel}, ranks={ranks})"


class PartitionByType(Enum):
    """Say where the shards of an option may lie."""

    DEVICE = "device"
    HOST = "host"
    UNIFORM = "uniform"
    MULTI_HOST = "multi_host"


@dataclass
class ParameterConstraints:
    """Hold what is asked of one table; what is left out is free.

    `pooling_factors` are ids per sample of each feature. Caches and virtual tables are kept and not priced.
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [POOLING_FACTOR])
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    feature_names: list[str] | None = None
    output_dtype: DataType | None = None
    device_group: str | None = None
    key_value_params: Any = None
    use_virtual_table: bool = False
