"""Topologies from what is known of a job, its hosts and its kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from tessera.distributed.planner._machines import GeneralizedCommsBandwidth, Topology
from tessera.distributed.planner.constants import (
    BWD_COMPUTE_MULTIPLIER,
    WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
)

logger = logging.getLogger(__name__)

_BANDWIDTHS = (
    "hbm_mem_bw",
    "ddr_mem_bw",
    "ssd_mem_bw",
    "hbm_to_ddr_mem_bw",
    "intra_host_bw",
    "inter_host_bw",
)


@dataclass(frozen=True)
class _Config:
    additional_params: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def get_param(self, key: str, default: Any = None) -> Any:
        """Return a further parameter."""
        return self.additional_params.get(key, default)

    def has_param(self, key: str) -> bool:
        """Return whether a further parameter is there."""
        return key in self.additional_params


@dataclass(frozen=True)
class HardwareConfig(_Config):
    """Hold what a host has: bytes of memory a rank, and bytes per millisecond."""

    hbm_cap_bytes: int | None = None
    ddr_cap_bytes: int | None = None
    ssd_cap_bytes: int | None = None
    intra_host_bw: float | None = None
    inter_host_bw: float | None = None
    hbm_mem_bw: float | None = None
    ddr_mem_bw: float | None = None
    hbm_to_ddr_mem_bw: float | None = None
    ssd_mem_bw: float | None = None

    def get_validation_issues(self, compute_device: str | None = None) -> list[str]:
        """Return what looks wrong, in words."""
        issues = [
            f"{name} is {getattr(self, name)}, not more than nothing"
            for name in ("hbm_cap_bytes", "ddr_cap_bytes", *_BANDWIDTHS)
            if getattr(self, name) is not None
            and getattr(self, name) <= 0
            and not (name == "hbm_cap_bytes" and compute_device == "cpu")
        ]
        if self.ssd_cap_bytes is not None and self.ssd_cap_bytes < 0:
            issues.append(f"ssd_cap_bytes is {self.ssd_cap_bytes}, less than nothing")
        if self.intra_host_bw and self.inter_host_bw and self.intra_host_bw < self.inter_host_bw:
            issues.append(
                f"links in a host ({self.intra_host_bw:.0f}) are slower than between hosts "
                f"({self.inter_host_bw:.0f})"
            )
        return issues

    def validate(self, compute_device: str | None = None) -> None:
        """Warn of what looks wrong."""
        for issue in self.get_validation_issues(compute_device):
            logger.warning("HardwareConfig: %s", issue)


@dataclass(frozen=True)
class TrainerConfig(_Config):
    """Hold what a job has: ranks, ranks of a host, and memory if it differs from the hardware's.

    A dry run plans for the memory of another machine.
    """

    world_size: int | None = None
    local_world_size: int | None = None
    hbm_cap_bytes: int | None = None
    ddr_cap_bytes: int | None = None
    ssd_cap_bytes: int | None = None
    is_dry_run: bool = False
    dry_run_hbm_bytes: int | None = None
    dry_run_ddr_bytes: int | None = None
    pod_size: int | None = None

    def validate(self) -> None:
        """Raise ValueError for what cannot be."""
        if self.world_size is None:
            raise ValueError("TrainerConfig: world_size is missing.")
        if self.pod_size is not None and self.pod_size > self.world_size:
            raise ValueError(
                f"TrainerConfig: pods of {self.pod_size} ranks, and there are {self.world_size}."
            )


@dataclass(frozen=True)
class KernelConfig(_Config):
    """Hold what kernels run on, and whether the hardware's bandwidths count or the assumed ones."""

    compute_device: str = "cuda"
    bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER
    weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
    uneven_sharding_perf_multiplier: float = 1.0
    use_hardware_based_bandwidth: bool = False
    generalized_comms_bandwidths: GeneralizedCommsBandwidth | None = None

    def validate(self) -> None:
        """Raise ValueError for a device that is not there."""
        if self.compute_device not in ("cpu", "cuda", "mtia"):
            raise ValueError(f"KernelConfig: {self.compute_device!r} is not one of cpu, cuda, mtia.")


class TopologyFactory:
    """Make topologies."""

    @staticmethod
    def create_topology(
        trainer_config: TrainerConfig,
        hardware_config: HardwareConfig | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> Topology:
        """Return the topology of a job; what the job says of memory wins over the hardware's."""
        hardware, kernel = hardware_config or HardwareConfig(), kernel_config or KernelConfig()
        trainer_config.validate()
        hardware.validate(kernel.compute_device)
        kernel.validate()
        given: dict[str, Any] = {
            "local_world_size": trainer_config.local_world_size,
            "pod_size": trainer_config.pod_size,
            "custom_topology_data": trainer_config.get_param("custom_topology_data"),
            "generalized_comms_bandwidths": kernel.generalized_comms_bandwidths,
        }
        for memory in ("hbm", "ddr", "ssd"):
            own = getattr(trainer_config, f"{memory}_cap_bytes")
            given[f"{memory}_cap"] = getattr(hardware, f"{memory}_cap_bytes") if own is None else own
        if trainer_config.is_dry_run:
            for memory in ("hbm", "ddr"):
                dry = getattr(trainer_config, f"dry_run_{memory}_bytes")
                given[f"{memory}_cap"] = given[f"{memory}_cap"] if dry is None else dry
        if kernel.use_hardware_based_bandwidth:
            given |= {name: getattr(hardware, name) for name in _BANDWIDTHS}
        assert trainer_config.world_size is not None
        return Topology(
            world_size=trainer_config.world_size,
            compute_device=kernel.compute_device,
            bwd_compute_multiplier=kernel.bwd_compute_multiplier,
            weighted_feature_bwd_compute_multiplier=kernel.weighted_feature_bwd_compute_multiplier,
            uneven_sharding_perf_multiplier=kernel.uneven_sharding_perf_multiplier,
            **{name: value for name, value in given.items() if value is not None},
        )
