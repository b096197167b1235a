"""Ranks as a planner sees them: memory, speeds, hosts."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from enum import Enum

from tessera.distributed.planner.constants import (
    BWD_COMPUTE_MULTIPLIER,
    CROSS_NODE_BANDWIDTH,
    DDR_CAP,
    DDR_MEM_BW,
    HBM_CAP,
    HBM_MEM_BW,
    HBM_TO_DDR_MEM_BW,
    INTRA_NODE_BANDWIDTH,
    SSD_CAP,
    SSD_MEM_BW,
    WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
)


@dataclass
class Perf:
    """Milliseconds of a step, by part.

    As in torchrec, ids on their way are not part of the total: where they count, they are in `fwd_comms` too.
    """

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """Return all parts but the ids, one after the other.

        >>> Perf(1, 2, 3, 4, input_dist_comms=100).total
        10.0
        """
        parts = (self.fwd_compute, self.fwd_comms, self.bwd_compute, self.bwd_comms, self.prefetch_compute)
        return sum(parts)

    def __add__(self, other: Perf) -> Perf:
        return Perf(
            self.fwd_compute + other.fwd_compute,
            self.fwd_comms + other.fwd_comms,
            self.bwd_compute + other.bwd_compute,
            self.bwd_comms + other.bwd_comms,
            self.input_dist_comms + other.input_dist_comms,
            self.prefetch_compute + other.prefetch_compute,
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
        """Return the bandwidth of the slowest link of a group; a sum of all goes over a host's links."""
        if collective_type == CollectiveType.ALL_REDUCE:
            return self._inter * local_world_size
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
        self._custom_topology_data = custom_topology_data
        self._measured: list[dict[str, float]] | None = None
        self._assumed: dict[str, float] = {}  # in place of the defaults, where nothing was measured
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

    def given_speeds(self) -> dict[str, float]:
        """Return, as the engine names them, the speeds (bytes per second) that were not left at defaults."""
        on_device = self._compute_device != "cpu"
        memory = (self._hbm_mem_bw, HBM_MEM_BW) if on_device else (self._ddr_mem_bw, DDR_MEM_BW)
        pairs = {
            "memory_speed": memory,
            "host_speed": (self.intra_host_bw, INTRA_NODE_BANDWIDTH),
            "network_speed": (self.inter_host_bw, CROSS_NODE_BANDWIDTH),
        }
        return {name: 1000 * value for name, (value, default) in pairs.items() if value != default}

    def use_measured(self, speeds: list[dict[str, float]]) -> None:
        """Take what the ranks' machines were measured to do; an empty entry: that one was not."""
        if len(speeds) != self._world_size:
            raise ValueError(f"Topology: {len(speeds)} measurements for {self._world_size} ranks.")
        self._measured = speeds

    def speeds(self, rank: int = 0) -> dict[str, float]:
        """Return the speeds of a rank as the engine names them: given, else measured, else assumed."""
        on_device = self._compute_device != "cpu"
        found = {
            "memory_speed": 1000 * (self._hbm_mem_bw if on_device else self._ddr_mem_bw),
            "host_speed": 1000 * self.intra_host_bw,
            "network_speed": 1000 * self.inter_host_bw,
        }
        measured = dict(self._measured[rank]) if self._measured else {}
        given = self.given_speeds()
        if "memory_speed" in given:
            # Whoever says how fast memory is says so of lookups and steps.
            links = ("host_speed", "network_speed")
            measured = {name: value for name, value in measured.items() if name in links}
        return {**found, **self._assumed, **measured, **given}

    def __repr__(self) -> str:
        lines = [f"world_size={self._world_size}", f"compute_device={self._compute_device}"]
        lines += [f"\trank {device.rank}: {device.storage}" for device in self._devices]
        lines.append(f"intra_host_bw={self.intra_host_bw}, inter_host_bw={self.inter_host_bw}")
        return "\n".join(lines)
