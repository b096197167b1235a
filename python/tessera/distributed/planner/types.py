"""What a planner is given and gives: machines, constraints, shards and their costs."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from tessera.distributed.planner.constants import (
    BWD_COMPUTE_MULTIPLIER,
    CROSS_NODE_BANDWIDTH,
    DDR_CAP,
    DDR_MEM_BW,
    HBM_CAP,
    HBM_MEM_BW,
    HBM_TO_DDR_MEM_BW,
    INTRA_NODE_BANDWIDTH,
    POOLING_FACTOR,
    SSD_CAP,
    SSD_MEM_BW,
    WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
)
from tessera.distributed.types import BoundsCheckMode, CacheParams, DataType, ModuleSharder, ShardingPlan

__all__ = [
    "BasicCommsBandwidths",
    "CollectiveType",
    "CustomTopologyData",
    "DeviceHardware",
    "Enumerator",
    "GeneralizedCommsBandwidth",
    "ParameterConstraints",
    "PartitionByType",
    "Partitioner",
    "Perf",
    "PerfModel",
    "PlanDebugStats",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "Shard",
    "ShardEstimator",
    "ShardingOption",
    "Stats",
    "Storage",
    "StorageReservation",
    "Topology",
]


@dataclass
class Perf:
    """Milliseconds of a step, by part."""

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    prefetch_compute: float = 0.0
    input_dist_comms: float = 0.0

    @property
    def total(self) -> float:
        """Return all parts, one after the other."""
        return (
            self.fwd_compute
            + self.fwd_comms
            + self.bwd_compute
            + self.bwd_comms
            + self.prefetch_compute
            + self.input_dist_comms
        )

    def __add__(self, other: Perf) -> Perf:
        return Perf(
            self.fwd_compute + other.fwd_compute,
            self.fwd_comms + other.fwd_comms,
            self.bwd_compute + other.bwd_compute,
            self.bwd_comms + other.bwd_comms,
            self.prefetch_compute + other.prefetch_compute,
            self.input_dist_comms + other.input_dist_comms,
        )

    def __hash__(self) -> int:
        return hash(
            (self.fwd_compute, self.fwd_comms, self.bwd_compute, self.bwd_comms, self.prefetch_compute)
        )


@dataclass(order=True)
class Storage:
    """Bytes, by kind of memory."""

    hbm: int
    ddr: int
    ssd: int = 0

    def __add__(self, other: Storage) -> Storage:
        return Storage(self.hbm + other.hbm, self.ddr + other.ddr, self.ssd + other.ssd)

    def __sub__(self, other: Storage) -> Storage:
        return Storage(self.hbm - other.hbm, self.ddr - other.ddr, self.ssd - other.ssd)

    def __hash__(self) -> int:
        return hash((self.hbm, self.ddr, self.ssd))

    def fits_in(self, other: Storage) -> bool:
        """Return whether this much of each kind is there."""
        return self.hbm <= other.hbm and self.ddr <= other.ddr and self.ssd <= other.ssd


@dataclass
class DeviceHardware:
    """Belong to one rank: memory that tables may have, and what is on it."""

    rank: int
    storage: Storage
    perf: Perf

    def __hash__(self) -> int:
        return hash((self.rank, self.storage, self.perf))


class CustomTopologyData:
    """Hold memory of single ranks: lists of `world_size` numbers by "hbm_cap", "ddr_cap" or "ssd_cap"."""

    supported_fields = ("ddr_cap", "hbm_cap", "ssd_cap")

    def __init__(self, data: dict[str, list[int]], world_size: int) -> None:
        for key, values in data.items():
            if key not in self.supported_fields:
                raise ValueError(
                    f"CustomTopologyData: {key!r} is not one of {', '.join(self.supported_fields)}."
                )
            if len(values) != world_size:
                raise ValueError(
                    f"CustomTopologyData: {key} has {len(values)} numbers, and there are {world_size} ranks."
                )
        self._data = {key: list(values) for key, values in data.items()}
        self._world_size = world_size

    def get_data(self, key: str) -> list[int]:
        """Return the numbers of all ranks."""
        if key not in self._data:
            raise ValueError(f"CustomTopologyData: there is no {key!r}; there are {', '.join(self._data)}.")
        return self._data[key]

    def has_data(self, key: str) -> bool:
        """Return whether there are numbers of that kind."""
        return key in self._data


class CollectiveType(Enum):
    """Name what is sent between ranks."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"


class GeneralizedCommsBandwidth(abc.ABC):
    """Say how fast ranks reach each other, in bytes per millisecond."""

    @abc.abstractmethod
    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Return the bandwidth of one collective."""

    @property
    @abc.abstractmethod
    def intra_host_bw(self) -> float:
        """Return the bandwidth inside a host."""

    @property
    @abc.abstractmethod
    def inter_host_bw(self) -> float:
        """Return the bandwidth between hosts."""


class BasicCommsBandwidths(GeneralizedCommsBandwidth):
    """Hold two bandwidths: inside a host, and between hosts."""

    def __init__(
        self, inter_host_bw: float = CROSS_NODE_BANDWIDTH, intra_host_bw: float = INTRA_NODE_BANDWIDTH
    ) -> None:
        self._inter, self._intra = inter_host_bw, intra_host_bw

    @property
    def intra_host_bw(self) -> float:
        """Return the bandwidth inside a host."""
        return self._intra

    @property
    def inter_host_bw(self) -> float:
        """Return the bandwidth between hosts."""
        return self._inter

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Return the bandwidth of the slower link that a group of that size uses."""
        return self._intra if world_size <= local_world_size else self._inter


class Topology:
    """Describe the ranks: how many, on which hosts, with which memory and speeds (bytes per millisecond).

    Memory is that of HBM on CUDA, else of DDR.
    """

    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: int | None = None,
        ddr_cap: int | None = None,
        ssd_cap: int | None = None,
        local_world_size: int | None = None,
        pod_size: int | None = None,
        hbm_mem_bw: float = HBM_MEM_BW,
        ddr_mem_bw: float = DDR_MEM_BW,
        ssd_mem_bw: float = SSD_MEM_BW,
        hbm_to_ddr_mem_bw: float = HBM_TO_DDR_MEM_BW,
        intra_host_bw: float = INTRA_NODE_BANDWIDTH,
        inter_host_bw: float = CROSS_NODE_BANDWIDTH,
        bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER,
        custom_topology_data: CustomTopologyData | None = None,
        weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
        uneven_sharding_perf_multiplier: float = 1.0,
        generalized_comms_bandwidths: GeneralizedCommsBandwidth | None = None,
    ) -> None:
        if compute_device not in ("cpu", "cuda", "mtia"):
            raise ValueError(f"Topology: there is no device {compute_device!r}; there are cpu and cuda.")
        if world_size < 1:
            raise ValueError(f"Topology: there are {world_size} ranks.")
        self._world_size = world_size
        self._compute_device = compute_device
        self._local_world_size = local_world_size or world_size
        self._pod_size = pod_size or self._local_world_size
        if world_size % self._local_world_size != 0:
            raise ValueError(f"Topology: {world_size} ranks are not hosts of {self._local_world_size}.")
        has_hbm = compute_device != "cpu"
        caps = {"hbm_cap": (HBM_CAP if hbm_cap is None else hbm_cap) if has_hbm else 0}
        caps["ddr_cap"] = DDR_CAP if ddr_cap is None else ddr_cap
        caps["ssd_cap"] = SSD_CAP if ssd_cap is None else ssd_cap
        lists = {
            key: custom_topology_data.get_data(key)
            if custom_topology_data is not None and custom_topology_data.has_data(key)
            else [cap] * world_size
            for key, cap in caps.items()
        }
        self._devices = [
            DeviceHardware(
                rank,
                Storage(lists["hbm_cap"][rank], lists["ddr_cap"][rank], lists["ssd_cap"][rank]),
                Perf(0, 0, 0, 0),
            )
            for rank in range(world_size)
        ]
        self._hbm_mem_bw, self._ddr_mem_bw, self._ssd_mem_bw = hbm_mem_bw, ddr_mem_bw, ssd_mem_bw
        self._hbm_to_ddr_mem_bw = hbm_to_ddr_mem_bw
        self._comms = generalized_comms_bandwidths or BasicCommsBandwidths(inter_host_bw, intra_host_bw)
        self._bwd_compute_multiplier = bwd_compute_multiplier
        self._weighted_feature_bwd_compute_multiplier = weighted_feature_bwd_compute_multiplier
        self._uneven_sharding_perf_multiplier = uneven_sharding_perf_multiplier

    @property
    def compute_device(self) -> str:
        """Return where tables are looked up."""
        return self._compute_device

    @property
    def devices(self) -> list[DeviceHardware]:
        """Return the ranks."""
        return self._devices

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world_size

    @property
    def local_world_size(self) -> int:
        """Return the number of ranks of a host."""
        return self._local_world_size

    @property
    def intra_group_size(self) -> int:
        """Return the number of ranks that reach each other fast."""
        return self._pod_size

    @property
    def hbm_mem_bw(self) -> float:
        """Return the bandwidth of a device's memory."""
        return self._hbm_mem_bw

    @property
    def ddr_mem_bw(self) -> float:
        """Return the bandwidth of the host's memory."""
        return self._ddr_mem_bw

    @property
    def ssd_mem_bw(self) -> float:
        """Return the bandwidth of the disk."""
        return self._ssd_mem_bw

    @property
    def hbm_to_ddr_mem_bw(self) -> float:
        """Return the bandwidth between host and device."""
        return self._hbm_to_ddr_mem_bw

    @property
    def intra_host_bw(self) -> float:
        """Return the bandwidth inside a host."""
        return self._comms.intra_host_bw

    @property
    def inter_host_bw(self) -> float:
        """Return the bandwidth between hosts."""
        return self._comms.inter_host_bw

    @property
    def comms_bandwidths(self) -> GeneralizedCommsBandwidth:
        """Return how fast ranks reach each other."""
        return self._comms

    @property
    def bwd_compute_multiplier(self) -> float:
        """Return how much longer backward is taken to be."""
        return self._bwd_compute_multiplier

    @property
    def weighted_feature_bwd_compute_multiplier(self) -> float:
        """Return the same for features with weights."""
        return self._weighted_feature_bwd_compute_multiplier

    @property
    def uneven_sharding_perf_multiplier(self) -> float:
        """Return how much longer uneven shards are taken to be."""
        return self._uneven_sharding_perf_multiplier

    def __repr__(self) -> str:
        lines = [f"world_size={self._world_size}", f"compute_device={self._compute_device}"]
        lines += [f"\trank {device.rank}: {device.storage}" for device in self._devices]
        lines.append(f"intra_host_bw={self.intra_host_bw}, inter_host_bw={self.inter_host_bw}")
        return "\n".join(lines)


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


class PlannerErrorType(Enum):
    """Say why there is no plan."""

    INSUFFICIENT_STORAGE = "insufficient_storage"
    STRICT_CONSTRAINTS = "strict_constraints"
    PARTITION = "partition"
    OTHER = "other"
    PLANNER_INPUT_CONTEXT_MISMATCH = "planner_input_context_mismatch"
    PLAN_LOADING_FAILED = "plan_loading_failed"
    INVALID_RANK_ASSIGNMENT = "invalid_rank_assignment"
    INPUT_VALIDATION = "input_validation"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"
    INVALID_COMPUTE_KERNEL = "invalid_compute_kernel"


class PlannerError(Exception):
    """There is no plan; `error_type` says why."""

    def __init__(self, message: str, error_type: PlannerErrorType = PlannerErrorType.OTHER) -> None:
        self.error_type = error_type
        super().__init__(message)


class StorageReservation(abc.ABC):
    """Keep memory back for what is not a table."""

    @abc.abstractmethod
    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """Return a topology with the memory that is left."""

    @property
    def last_reserved_topology(self) -> Topology | None:
        """Return what the last call of `reserve` returned."""
        return None


class PerfModel(abc.ABC):
    """Rate a plan: lower is better."""

    @abc.abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the rating."""


class ShardEstimator(abc.ABC):
    """Fill in what shards cost."""

    @abc.abstractmethod
    def estimate(
        self, sharding_options: list[ShardingOption], sharder_map: dict[str, ModuleSharder] | None = None
    ) -> None:
        """Fill in the shards of the options."""


class Enumerator(abc.ABC):
    """List the ways to cut the tables of a model."""

    @abc.abstractmethod
    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Return all options."""

    @abc.abstractmethod
    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Fill in what they cost."""


class Proposer(abc.ABC):
    """Propose one option for every table, again and again."""

    @abc.abstractmethod
    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Take the options."""

    @abc.abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Hear how the last proposal did."""

    @abc.abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """Return the next proposal, None at the end."""


class Partitioner(abc.ABC):
    """Give the shards of a proposal their ranks."""

    @abc.abstractmethod
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Return the proposal with ranks. Raises PlannerError if memory does not suffice."""


@dataclass
class PlanDebugStats:
    """Tell how long the planner took."""

    planner_type: str
    timeout_seconds: int | None = None


class Stats(abc.ABC):
    """Print or keep what a planner did."""

    @abc.abstractmethod
    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: dict[str, ParameterConstraints] | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = False,
        debug_stats: PlanDebugStats | None = None,
    ) -> None:
        """Take what there is to tell."""
