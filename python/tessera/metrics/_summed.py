"""Sums over all samples and over the last ones, in double precision: what Tessera's metrics are made of."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from tessera import comm
from tessera.metrics._computation import MetricComputationReport, RecMetricException, Window, has_others
from tessera.metrics.metrics_namespace import MetricPrefix

__all__ = ["SummedComputation", "Synced"]


class Synced(abc.ABC):
    """Let the state of all ranks' samples stand in the place of this rank's for a while."""

    _group: dist.ProcessGroup | None
    _own: torch.Tensor | None = None  # this rank's state, while that of all ranks stands in its place

    @abc.abstractmethod
    def _add(
        self,
        predictions: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Add a batch to the state."""

    @abc.abstractmethod
    def _state_tensor(self) -> torch.Tensor:
        """Return the state as one tensor."""

    @abc.abstractmethod
    def _put(self, state: torch.Tensor) -> None:
        """Take a state."""

    @abc.abstractmethod
    def _over_ranks(self, state: torch.Tensor) -> torch.Tensor:
        """Return the state of all ranks' samples. Collective."""

    def _of_all(self) -> torch.Tensor:
        """Return the state of all ranks' samples, unless it stands here already. Collective."""
        state = self._state_tensor()
        return self._over_ranks(state) if self._own is None and has_others(self._group) else state

    @property
    def _is_synced(self) -> bool:
        return self._own is not None

    def sync(self) -> None:
        """Put the state of all ranks' samples into the place of this rank's, until `unsync`. Collective."""
        if self._own is not None:
            raise RecMetricException("metrics: sync was called twice. Call unsync before the second time.")
        if has_others(self._group):
            own = self._state_tensor()
            self._put(self._over_ranks(own))
            self._own = own

    def unsync(self) -> None:
        """Put this rank's state back."""
        if self._own is None:
            raise RecMetricException("metrics: unsync was called without a sync before it.")
        own, self._own = self._own, None
        self._put(own)

    def update(
        self,
        predictions: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Add a batch."""
        if self._own is not None:
            raise RecMetricException(
                "metrics: a batch came between sync and unsync and would be lost. Call unsync first."
            )
        self._add(predictions, labels, weights, inputs or {})


class SummedComputation(Synced, nn.Module):
    """Add up the numbers of one task, in double precision, and make metrics of the sums.

    Sums over all samples are state: of one element each, or of the shape that `shapes` names.
    """

    SUMS: ClassVar[tuple[str, ...]] = ()
    PERSISTENT: ClassVar[bool] = True

    def __init__(
        self,
        my_rank: int,
        window_size: int,
        compute_on_all_ranks: bool,
        group,
        *,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__()
        self._my_rank = my_rank
        self._on_all_ranks = compute_on_all_ranks
        self._group = group
        self._window = Window(window_size)
        self._shapes = {name: tuple((shapes or {}).get(name, (1,))) for name in self.sums()}
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        for name, shape in self._shapes.items():
            zeros = torch.zeros(shape, dtype=torch.float64)
            self.register_buffer(name, zeros, persistent=self.PERSISTENT)
        self.register_buffer(
            "_window_sums", torch.zeros(sum(self._sizes), dtype=torch.float64), persistent=False
        )

    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums."""
        return self.SUMS

    @abc.abstractmethod
    def _sums(
        self, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        """Return what a batch adds, by the names of the sums."""

    def _sums_with(
        self,
        predictions: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
    ) -> Mapping[str, torch.Tensor]:
        """Return what a batch adds where further tensors are needed."""
        return self._sums(predictions, labels, weights)

    @abc.abstractmethod
    def _numbers(self, sums: Mapping[str, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return the metrics of sums, by name or by (name, description)."""

    def _add(self, predictions, labels, weights, inputs) -> None:
        added = self._sums_with(predictions.double(), labels.double(), weights.double(), inputs)
        if not added:
            return
        batch = torch.cat([added[name].double().reshape(-1) for name in self._shapes])
        batch = batch.to(self._window_sums.device)
        for (name, shape), part in zip(self._shapes.items(), batch.split(self._sizes), strict=True):
            getattr(self, name).add_(part.reshape(shape))
        self._window_sums.add_(batch)
        for old in self._window.add(labels.size(-1), batch):
            self._window_sums.sub_(old)
        if not self._window.batches:
            self._window_sums.zero_()

    def _parts(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = zip(self._shapes.items(), flat.split(self._sizes), strict=True)
        return {name: part.reshape(shape) for (name, shape), part in parts}

    def _flat(self) -> torch.Tensor:
        return torch.cat([getattr(self, name).reshape(-1) for name in self._shapes])

    def _reports(self, totals: torch.Tensor, last: torch.Tensor) -> list[MetricComputationReport]:
        found = []
        for prefix, flat in ((MetricPrefix.LIFETIME, totals), (MetricPrefix.WINDOW, last)):
            for key, value in self._numbers(self._parts(flat)).items():
                name, description = key if isinstance(key, tuple) else (key, None)
                found.append(MetricComputationReport(name, prefix, value, description))
        return found

    def local_compute(self) -> list[MetricComputationReport]:
        """Return the metrics of this rank's samples."""
        return self._reports(self._flat(), self._window_sums)

    def _state_tensor(self) -> torch.Tensor:
        return torch.cat([self._flat(), self._window_sums])

    def _over_ranks(self, state: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce(state, self._group)

    def compute(self) -> list[MetricComputationReport]:
        """Return the metrics of all ranks' samples: on rank 0, or on all if asked for. Collective."""
        flat = self._of_all()
        if self._my_rank != 0 and not self._on_all_ranks:
            return []
        return self._reports(*flat.split(sum(self._sizes)))

    def _put(self, state: torch.Tensor) -> None:
        totals, last = state.split(sum(self._sizes))
        for name, value in self._parts(totals).items():
            getattr(self, name).copy_(value)
        self._window_sums.copy_(last)

    def reset(self) -> None:
        """Forget everything."""
        self._own = None
        self._window.clear()
        self._window_sums.zero_()
        for name in self._shapes:
            getattr(self, name).zero_()
