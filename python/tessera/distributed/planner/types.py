"""What a planner is given and gives: machines, constraints, shards and their costs."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from tessera.distributed.planner._machines import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    DeviceHardware,
    GeneralizedCommsBandwidth,
    Perf,
    Storage,
    Topology,
)
from tessera.distributed.planner._options import (
    ParameterConstraints,
    PartitionByType,
    Shard,
    ShardingOption,
)
from tessera.distributed.planner._topology_factory import (
    HardwareConfig,
    KernelConfig,
    TopologyFactory,
    TrainerConfig,
)
from tessera.distributed.types import (
    ModuleSharder,
    ShardingPlan,
    _quantised_size_bytes,
    get_tensor_size_bytes,
)

__all__ = [
    "BasicCommsBandwidths",
    "CollectiveType",
    "CriticalPathEstimate",
    "CustomTopologyData",
    "DeviceHardware",
    "Enumerator",
    "GeneralizedCommsBandwidth",
    "HardwareConfig",
    "KernelConfig",
    "ParameterConstraints",
    "PartitionByType",
    "Partitioner",
    "Perf",
    "PerfModel",
    "PlanDebugStats",
    "PlanLoader",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "Shard",
    "ShardEstimator",
    "SharderData",
    "ShardingOption",
    "Stats",
    "Storage",
    "StorageReservation",
    "Topology",
    "TopologyFactory",
    "TrainerConfig",
    "hash_planner_context_inputs",
    "hash_planner_context_inputs_str",
    "hash_sha256_str",
    "hash_sha256_to_int",
]


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


class PlanLoader(abc.ABC):
    """Fetch a plan that was made before."""

    @abc.abstractmethod
    def load(self) -> dict[int, ShardingOption] | None:
        """Return the options by `ShardingOption.storage_hash`, None if there is no plan."""

    @abc.abstractmethod
    def plan_context_hash(self) -> str | None:
        """Return the hash of what the plan was made for, None if nobody kept it."""

    def get_plan_id(self) -> str | None:
        """Return a name of the plan for messages."""
        return None


@dataclass
class SharderData:
    """Hold what estimators ask of a sharder, without the sharder."""

    fused_params: dict[str, Any]
    qcomm_dtype_sizes: dict[str, tuple[float, float]]
    storage_usage_type: str = "BaseEmbeddingSharder"

    def usage(self, tensor: torch.Tensor, compute_device: str, compute_kernel: str) -> dict[str, int]:
        """Return the bytes that a table takes, by kind of memory."""
        is_quantised = "Quant" in str(self.storage_usage_type)
        kind = "ddr" if compute_device == "cpu" or "uvm" in compute_kernel else "hbm"
        return {kind: (_quantised_size_bytes if is_quantised else get_tensor_size_bytes)(tensor)}


@dataclass
class CriticalPathEstimate:
    """Hold the milliseconds of a step that ranks send, and that they work."""

    comms_estimate: float
    comp_estimate: float

    def total(self) -> float:
        """Return both."""
        return self.comms_estimate + self.comp_estimate


@dataclass
class PlanDebugStats:
    """Tell how long the planner took, and what the engine answered, if it was asked."""

    planner_type: str
    timeout_seconds: int | None = None
    result: Any = None  # a PlanResult


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


def hash_sha256_to_int(hashable_list: list[Any]) -> int:
    """Return a hash of things by what they print, the same in every process."""
    return int(hash_sha256_str(hashable_list), 16)


def hash_sha256_str(hashable_list: list[Any]) -> str:
    """Return the same in hexadecimal digits."""
    return hashlib.sha256(str(hashable_list).encode()).hexdigest()


def hash_planner_context_inputs(
    topology: Topology,
    batch_size: int,
    enumerator: Enumerator,
    storage_reservation: StorageReservation,
    constraints: dict[str, ParameterConstraints] | None,
    hash_function: Callable[[list[Any]], Any] = hash_sha256_to_int,
) -> Any:
    """Return a hash of what a plan is made for. Enumerator and reservation must have been asked before."""
    space = getattr(enumerator, "last_stored_search_space", None)
    left = storage_reservation.last_reserved_topology
    if space is None or left is None:
        raise ValueError(
            "hash_planner_context_inputs: enumerate options and reserve storage first; there is no "
            f"{'search space' if space is None else 'reserved topology'} yet."
        )
    options = [
        (o.fqn, o.sharding_type, o.compute_kernel, [(s.size, s.offset) for s in o.shards], o.cache_params)
        for o in space
    ]
    asked = sorted((constraints or {}).items())
    policy = type(storage_reservation).__name__
    return hash_function([repr(topology), batch_size, options, policy, repr(left), asked])


def hash_planner_context_inputs_str(
    topology: Topology,
    batch_size: int,
    enumerator: Enumerator,
    storage_reservation: StorageReservation,
    constraints: dict[str, ParameterConstraints] | None,
    hash_function: Callable[[list[Any]], str] = hash_sha256_str,
) -> str:
    """Return the same in hexadecimal digits."""
    return hash_planner_context_inputs(
        topology, batch_size, enumerator, storage_reservation, constraints, hash_function
    )
