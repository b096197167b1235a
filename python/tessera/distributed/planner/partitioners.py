"""Ranks for the shards of a proposal."""

from __future__ import annotations

import copy
import heapq
import logging
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from tessera.distributed.planner.perf_models import NoopPerfModel
from tessera.distributed.planner.types import (
    DeviceHardware,
    PartitionByType,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from tessera.distributed.planner.utils import mb_to_bytes, reset_shard_rank

__all__ = [
    "GreedyPerfPartitioner",
    "MemoryBalancedPartitioner",
    "OrderedDeviceHardware",
    "ShardingOptionGroup",
    "SortBy",
]

logger = logging.getLogger(__name__)


@dataclass
class ShardingOptionGroup:
    """Hold options that must lie together, and what they ask for."""

    sharding_options: list[ShardingOption]
    storage_sum: Storage
    perf_sum: float
    param_count: int


class SortBy(Enum):
    """Say which options are laid first: those with most bytes, or with most milliseconds."""

    STORAGE = "storage"
    PERF = "perf"


@dataclass
class OrderedDeviceHardware:
    """Order ranks by what they have to do; of equals, hosts take turns."""

    device: DeviceHardware
    local_world_size: int

    def _key(self) -> tuple[float, int, int]:
        return self.device.perf.total, self.device.rank % self.local_world_size, self.device.rank

    def __lt__(self, other: OrderedDeviceHardware) -> bool:
        return self._key() < other._key()


def _fail(message: str) -> PlannerError:
    return PlannerError(message, PlannerErrorType.PARTITION)


def _lay(shard: Shard, device: DeviceHardware) -> None:
    assert shard.storage is not None and shard.perf is not None
    shard.rank = device.rank
    device.storage = device.storage - shard.storage
    device.perf = device.perf + shard.perf


def _storage(shard: Shard) -> Storage:
    assert shard.storage is not None, "an estimator has to fill in the storage first"
    return shard.storage


def _groups(
    options: list[ShardingOption], sort_by: SortBy, balance_modules: bool
) -> list[ShardingOptionGroup]:
    """Return what is not on all ranks alike, in the order in which it is laid."""
    per_module = Counter(option.path for option in options)
    groups: dict[str, ShardingOptionGroup] = {}
    for option in options:
        if option.partition_by == PartitionByType.UNIFORM.value:
            continue
        key = option.dependency or option.fqn
        if key in groups:
            group = groups[key]
            group.sharding_options.append(option)
            group.storage_sum = group.storage_sum + option.total_storage
            group.perf_sum += option.total_perf
        else:
            # Small modules first, where modules are to be spread.
            groups[key] = ShardingOptionGroup(
                [option], option.total_storage, option.total_perf, -per_module[option.path]
            )

    def order(group: ShardingOptionGroup) -> tuple:
        size = group.storage_sum if sort_by == SortBy.STORAGE else group.perf_sum
        return (group.param_count, size) if balance_modules else (size,)

    return sorted(groups.values(), key=order, reverse=True)


class GreedyPerfPartitioner(Partitioner):
    """Lay the largest options first, each on the rank or host that has least to do and has room."""

    def __init__(self, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False) -> None:
        self._sort_by, self._balance_modules = sort_by, balance_modules

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology, hbm_per_device: int | None = None
    ) -> list[ShardingOption]:
        """Return the proposal with ranks; `hbm_per_device` may be less than what the topology has.

        Raises PlannerError(PARTITION) if memory does not suffice.
        """
        devices = [
            DeviceHardware(
                device.rank,
                Storage(hbm_per_device or device.storage.hbm, device.storage.ddr, device.storage.ssd),
                copy.copy(device.perf),
            )
            for device in storage_constraint.devices
        ]
        size = storage_constraint.intra_group_size
        hosts = [devices[i : i + size] for i in range(0, len(devices), size)]
        for option in proposal:
            if option.partition_by == PartitionByType.UNIFORM.value:
                self._lay_on_each(option, devices)
        for group in _groups(proposal, self._sort_by, self._balance_modules):
            where = group.sharding_options[0].partition_by
            if where == PartitionByType.MULTI_HOST.value:
                self._lay_on_hosts(group, hosts)
            elif where == PartitionByType.HOST.value:
                self._lay_on_one_host(group, hosts)
            elif where == PartitionByType.DEVICE.value:
                for option in group.sharding_options:
                    self._lay_anywhere(option, devices, storage_constraint.local_world_size)
            else:
                raise _fail(
                    f"partition: {where!r} of {group.sharding_options[0].fqn} is no place for shards."
                )
        return proposal

    @staticmethod
    def _lay_on_each(option: ShardingOption, devices: list[DeviceHardware]) -> None:
        if option.num_shards != len(devices):
            raise _fail(
                f"partition: {option.fqn} has {option.num_shards} shards for {len(devices)} ranks, one each."
            )
        for shard, device in zip(option.shards, devices, strict=True):
            if not _storage(shard).fits_in(device.storage):
                raise _fail(
                    f"partition: a shard of {option.fqn} needs {shard.storage}; rank {device.rank} has "
                    f"{device.storage}."
                )
            _lay(shard, device)

    @staticmethod
    def _lay_anywhere(option: ShardingOption, devices: list[DeviceHardware], local_world_size: int) -> None:
        heap = [OrderedDeviceHardware(device, local_world_size) for device in devices]
        heapq.heapify(heap)
        # Rows on a disk have one store a rank, so their columns need ranks of their own.
        is_alone = option.compute_kernel == "key_value" and option.sharding_type == "column_wise"
        for shard in option.shards:
            passed = []
            while heap and not _storage(shard).fits_in(heap[0].device.storage):
                passed.append(heapq.heappop(heap))
            if not heap:
                most = max((one.device.storage for one in passed), default=Storage(0, 0))
                raise _fail(
                    f"partition: a shard of {option.fqn} needs {shard.storage}; the rank with most room has "
                    f"{most}."
                )
            taken = heapq.heappop(heap)
            _lay(shard, taken.device)
            for one in passed if is_alone else [*passed, taken]:
                heapq.heappush(heap, one)

    @classmethod
    def _lay_on_one_host(cls, group: ShardingOptionGroup, hosts: list[list[DeviceHardware]]) -> None:
        for host in sorted(hosts, key=lambda host: sum(device.perf.total for device in host)):
            room = sum((device.storage for device in host), Storage(0, 0))
            if not group.storage_sum.fits_in(room):
                continue
            trial = copy.deepcopy(host)
            try:
                for option in group.sharding_options:
                    if option.sharding_type == "table_row_wise":
                        cls._lay_on_each(option, trial)
                    else:
                        cls._lay_anywhere(option, trial, len(trial))
            except PlannerError:
                continue
            cls._keep(trial, host)
            return
        names = ", ".join(option.fqn for option in group.sharding_options)
        raise _fail(f"partition: no host has room for {names}, which needs {group.storage_sum}.")

    @classmethod
    def _lay_on_hosts(cls, group: ShardingOptionGroup, hosts: list[list[DeviceHardware]]) -> None:
        (option,) = group.sharding_options
        count, rest = divmod(option.num_shards, len(hosts[0]))
        if rest:
            raise _fail(
                f"partition: {option.fqn} has {option.num_shards} shards, not a multiple of the "
                f"{len(hosts[0])} ranks of a host."
            )
        ordered = sorted(hosts, key=lambda host: sum(device.perf.total for device in host))
        for first in range(max(1, len(ordered) - count + 1)):
            # More parts than hosts: some hosts take several.
            chosen = [ordered[(first + i) % len(ordered)] for i in range(count)]
            trial = copy.deepcopy(chosen)
            try:
                cls._lay_on_each(option, [device for host in trial for device in host])
            except PlannerError:
                continue
            for copied, host in zip(trial, chosen, strict=True):
                cls._keep(copied, host)
            return
        raise _fail(f"partition: no {count} hosts have room for {option.fqn}, {group.storage_sum} in all.")

    @staticmethod
    def _keep(trial: list[DeviceHardware], host: list[DeviceHardware]) -> None:
        for copied, device in zip(trial, host, strict=True):
            device.storage, device.perf = copied.storage, copied.perf


class MemoryBalancedPartitioner(Partitioner):
    """Lay as GreedyPerfPartitioner does, with as little memory a rank as costs at most `tolerance` more."""

    def __init__(
        self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False
    ) -> None:
        self._max_search_count, self._tolerance = max_search_count, tolerance
        self._balance_modules = balance_modules

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Return the proposal with ranks. Raises PlannerError(PARTITION) if memory does not suffice."""
        rate = NoopPerfModel(storage_constraint).rate
        greedy = GreedyPerfPartitioner(SortBy.PERF, self._balance_modules)
        greedy.partition(proposal, storage_constraint)
        best = [option.get_shards_assignment() for option in proposal]
        most_allowed = rate(proposal) * (1 + self._tolerance)
        shards = [shard for option in proposal for shard in option.shards]
        held = Counter[int | None]()
        for shard in shards:
            held[shard.rank] += _storage(shard).hbm
        high = max(held.values(), default=0)
        mean = sum(held.values()) // storage_constraint.world_size
        low = max([mean, *(_storage(shard).hbm for shard in shards)])
        for _ in range(self._max_search_count):
            if low + mb_to_bytes(10) >= high:
                break
            middle = (low + high) // 2
            reset_shard_rank(proposal)
            try:
                greedy.partition(proposal, storage_constraint, middle)
            except PlannerError:
                low = middle
                continue
            if rate(proposal) > most_allowed:
                low = middle
                continue
            best, high = [option.get_shards_assignment() for option in proposal], middle
        for option, ranks in zip(proposal, best, strict=True):
            for shard, rank in zip(option.shards, ranks, strict=True):
                shard.rank = rank
        return proposal
