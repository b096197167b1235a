"""Averaging parameters every so many steps: the names of torch's averagers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from tessera import _C
from tessera.distributed.algorithms.model_averaging.utils import get_params_to_average

__all__ = ["ModelAverager", "PeriodicModelAverager"]


class ModelAverager(ABC):
    """Averages a model's parameters now and then; call it after every optimizer step."""

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        self.process_group = process_group if process_group is not None else dist.group.WORLD

    @property
    @abstractmethod
    def step(self) -> int:
        """Calls so far."""

    @abstractmethod
    def average_parameters(self, params: Iterable[Any]) -> None:
        """Count a step and average if it is time."""


class EngineAverager(ModelAverager):
    """Averages as the engine does; a subclass makes `_native`."""

    _native: _C.PeriodicModelAverager | _C.HierarchicalModelAverager

    @property
    def step(self) -> int:
        return self._native.step

    @step.setter
    def step(self, value: int) -> None:
        self._native.step = value

    def average_parameters(self, params: Iterable[Any]) -> None:
        self._native.average_parameters(get_params_to_average(params))


class PeriodicModelAverager(EngineAverager):
    """Averages every `period` steps once `warmup_steps` are over."""

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None):
        super().__init__(process_group)
        self.period = period
        self.warmup_steps = warmup_steps
        self._native = _C.PeriodicModelAverager(self.process_group, period, warmup_steps)
