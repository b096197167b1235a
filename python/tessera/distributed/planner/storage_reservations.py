"""Memory that tables do not get: dense layers, the batch, the program."""

from __future__ import annotations

import copy

from torch import nn

from tessera.distributed.planner.types import ParameterConstraints, Storage, StorageReservation, Topology
from tessera.distributed.planner.utils import gb_to_bytes
from tessera.distributed.types import ModuleSharder, get_tensor_size_bytes

__all__ = [
    "FixedAbsoluteStorageReservation",
    "FixedPercentageStorageReservation",
    "HeuristicalStorageReservation",
    "InferenceStorageReservation",
]


def _dense_bytes(module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> int:
    """Return the bytes of everything that no sharder takes."""
    kinds = {sharder.module_type for sharder in sharders}
    if type(module) in kinds:
        return 0
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(map(get_tensor_size_bytes, own)) + sum(
        _dense_bytes(child, sharders) for child in module.children()
    )


class _Reservation(StorageReservation):
    def __init__(self, percentage: float) -> None:
        if not 0 <= percentage <= 1:
            raise ValueError(f"{type(self).__name__}: {percentage} is not a share from 0 to 1.")
        self._percentage = percentage
        self._last: Topology | None = None

    def _bytes(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> int:
        return 0

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """Return a topology with the memory that is left. What the batch needs is the planner's count."""
        left = copy.deepcopy(topology)
        held = self._bytes(module, sharders)
        on_device = topology.compute_device != "cpu"
        for device in left.devices:
            hbm, ddr = device.storage.hbm, device.storage.ddr
            if on_device:
                hbm = int(hbm * (1 - self._percentage)) - held
            else:
                ddr = int(ddr * (1 - self._percentage)) - held
            device.storage = Storage(max(0, hbm), max(0, ddr), device.storage.ssd)
        self._last = left
        return left

    @property
    def last_reserved_topology(self) -> Topology | None:
        """Return what the last call of `reserve` returned."""
        return copy.deepcopy(self._last)


class FixedPercentageStorageReservation(_Reservation):
    """Keep a share of the memory back."""


class FixedAbsoluteStorageReservation(_Reservation):
    """Keep so many bytes of every rank back."""

    def __init__(self, hbm_reserved_bytes: int) -> None:
        super().__init__(0.0)
        if hbm_reserved_bytes < 0:
            raise ValueError(
                f"FixedAbsoluteStorageReservation: {hbm_reserved_bytes} bytes are less than none."
            )
        self._reserved = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """Return one that keeps so many GiB back."""
        return cls(gb_to_bytes(hbm_reserved_gb))

    def _bytes(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> int:
        return self._reserved


class HeuristicalStorageReservation(_Reservation):
    """Keep back a share, and the dense parameters with gradients, state and buckets: six times their size."""

    def __init__(
        self, percentage: float, parameter_multiplier: float = 6.0, dense_tensor_estimate: int | None = None
    ) -> None:
        super().__init__(percentage)
        self._parameter_multiplier = parameter_multiplier
        self._dense_tensor_estimate = dense_tensor_estimate

    def _bytes(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> int:
        if self._dense_tensor_estimate is not None:
            return self._dense_tensor_estimate
        return int(_dense_bytes(module, sharders) * self._parameter_multiplier)


class InferenceStorageReservation(HeuristicalStorageReservation):
    """Keep back a share, and the dense parameters once."""

    def __init__(self, percentage: float, dense_tensor_estimate: int | None = None) -> None:
        super().__init__(percentage, 1.0, dense_tensor_estimate)
