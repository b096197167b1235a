"""What all metrics have in common: sums over all samples and over the last ones, added up over ranks."""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from tessera import comm
from tessera.metrics.metrics_config import RecComputeMode, RecTaskInfo
from tessera.metrics.metrics_namespace import (
    MetricNameBase,
    MetricNamespaceBase,
    MetricPrefix,
    compose_metric_key,
)

__all__ = [
    "MetricComputationReport",
    "RecMetric",
    "RecMetricComputation",
    "RecMetricException",
    "RecMetricList",
]

Values = torch.Tensor | Mapping[str, torch.Tensor]


class RecMetricException(Exception):
    """Say that a metric was given what it cannot use."""


@dataclass
class MetricComputationReport:
    """Hold one number of one task."""

    name: MetricNameBase
    metric_prefix: MetricPrefix
    value: torch.Tensor
    description: str | None = None


class Window:
    """Keep what the last `size` samples of this rank brought, batch by batch."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._count = 0
        self.batches: deque[tuple[int, Any]] = deque()

    def add(self, count: int, batch: Any) -> list[Any]:
        """Add a batch; return those that have left."""
        self.batches.append((count, batch))
        self._count += count
        gone = []
        while self._count > self._size and self.batches:
            number, old = self.batches.popleft()
            self._count -= number
            gone.append(old)
        return gone

    def clear(self) -> None:
        """Forget everything."""
        self.batches.clear()
        self._count = 0


class RecMetricComputation(nn.Module, abc.ABC):
    """Add up the numbers of one task, in double precision, and make metrics of the sums.

    Sums over all samples are state, of one element each.
    """

    SUMS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, my_rank: int, window_size: int, compute_on_all_ranks: bool, group) -> None:
        super().__init__()
        self._my_rank = my_rank
        self._on_all_ranks = compute_on_all_ranks
        self._group = group
        self._window = Window(window_size)
        for name in self.SUMS:
            self.register_buffer(name, torch.zeros(1, dtype=torch.float64))
        self.register_buffer(
            "_window_sums", torch.zeros(len(self.SUMS), dtype=torch.float64), persistent=False
        )

    @abc.abstractmethod
    def _sums(
        self, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        """Return what a batch adds, by the names of SUMS."""

    @abc.abstractmethod
    def _numbers(self, sums: Mapping[str, torch.Tensor]) -> dict[MetricNameBase, torch.Tensor]:
        """Return the metrics of sums."""

    def update(self, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
        """Add a batch."""
        given = (predictions.double(), labels.double(), weights.double())
        added = self._sums(*given)
        batch = torch.stack([added[name].reshape(()) for name in self.SUMS]).to(self._window_sums.device)
        for place, name in enumerate(self.SUMS):
            getattr(self, name).add_(batch[place])
        self._window_sums.add_(batch)
        for old in self._window.add(predictions.numel(), batch):
            self._window_sums.sub_(old)
        if not self._window.batches:
            self._window_sums.zero_()

    def _state(self, is_window: bool) -> dict[str, torch.Tensor]:
        parts = [
            self._window_sums[i : i + 1] if is_window else getattr(self, n) for i, n in enumerate(self.SUMS)
        ]
        return dict(zip(self.SUMS, parts, strict=True))

    def _reports(self, sums: Mapping[str, Mapping[str, torch.Tensor]]) -> list[MetricComputationReport]:
        return [
            MetricComputationReport(name, prefix, value)
            for prefix in (MetricPrefix.LIFETIME, MetricPrefix.WINDOW)
            for name, value in self._numbers(sums[prefix.name]).items()
        ]

    def local_compute(self) -> list[MetricComputationReport]:
        """Return the metrics of this rank's samples."""
        return self._reports({"LIFETIME": self._state(False), "WINDOW": self._state(True)})

    def compute(self) -> list[MetricComputationReport]:
        """Return the metrics of all ranks' samples: on rank 0, or on all if asked for. Collective."""
        flat = torch.cat([*self._state(False).values(), self._window_sums])
        if self._group is not None and self._group.size() > 1:
            flat = comm.all_reduce(flat, self._group)
        if self._my_rank != 0 and not self._on_all_ranks:
            return []
        count = len(self.SUMS)
        totals, last = flat[:count].split(1), flat[count:].split(1)
        return self._reports(
            {
                "LIFETIME": dict(zip(self.SUMS, totals, strict=True)),
                "WINDOW": dict(zip(self.SUMS, last, strict=True)),
            }
        )

    def reset(self) -> None:
        """Forget everything."""
        self._window.clear()
        self._window_sums.zero_()
        for name in self.SUMS:
            getattr(self, name).zero_()


def _group_of(group: dist.ProcessGroup | None, world_size: int) -> dist.ProcessGroup | None:
    if group is None and world_size > 1 and dist.is_initialized():
        return dist.group.WORLD
    return group


class RecMetric(nn.Module, abc.ABC):
    """Compute one kind of metric for several tasks.

    `window_size` is in samples of all ranks; `process_group` is the world if left out.
    """

    _namespace: MetricNamespaceBase
    _computation_class: type[RecMetricComputation]

    def __init__(
        self,
        world_size: int,
        my_rank: int,
        batch_size: int,
        tasks: list[RecTaskInfo],
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        window_size: int = 100,
        fused_update_limit: int = 0,
        compute_on_all_ranks: bool = False,
        should_validate_update: bool = False,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._tasks = tasks
        self._batch_size = batch_size
        self._metrics_computations = nn.ModuleList(
            self._computation_class(
                my_rank,
                math.ceil(window_size / world_size),
                compute_on_all_ranks,
                _group_of(process_group, world_size),
                **kwargs,
            )
            for _ in tasks
        )

    def _of_task(self, values: Values | None, task: RecTaskInfo, place: int) -> torch.Tensor | None:
        if values is None or isinstance(values, Mapping):
            return None if values is None else values.get(task.name)
        return values if len(self._tasks) == 1 else values[place]

    def update(self, *, predictions: Values, labels: Values, weights: Values | None, **kwargs: Any) -> None:
        """Add a batch: tensors by the names of tasks, or one of [tasks, batch]. Weights are 1 if left out."""
        for place, (task, computation) in enumerate(
            zip(self._tasks, self._metrics_computations, strict=True)
        ):
            given = self._of_task(predictions, task, place)
            if given is None:
                continue
            marks = self._of_task(labels, task, place)
            if marks is None or marks.numel() != given.numel():
                count = 0 if marks is None else marks.numel()
                raise RecMetricException(
                    f"metrics.{self._namespace}: task {task.name!r} has {given.numel()} predictions and "
                    f"{count} labels."
                )
            counts = self._of_task(weights, task, place)
            counts = torch.ones_like(given) if counts is None else counts
            with torch.no_grad():
                computation.update(given.reshape(-1), marks.reshape(-1), counts.reshape(-1))

    def _named(self, reports: list[list[MetricComputationReport]]) -> dict[str, torch.Tensor]:
        return {
            compose_metric_key(
                self._namespace, task.name, report.name, report.metric_prefix, report.description
            ): report.value
            for task, found in zip(self._tasks, reports, strict=True)
            for report in found
        }

    def compute(self) -> dict[str, torch.Tensor]:
        """Return the metrics by key: on rank 0, or on all ranks if asked for. Collective."""
        return self._named([computation.compute() for computation in self._metrics_computations])

    def local_compute(self) -> dict[str, torch.Tensor]:
        """Return the metrics of this rank's samples by key."""
        return self._named([computation.local_compute() for computation in self._metrics_computations])

    def reset(self) -> None:
        """Forget everything."""
        for computation in self._metrics_computations:
            computation.reset()

    def get_required_inputs(self) -> set[str]:
        """Return the names of further tensors that are needed: none."""
        return set()


class RecMetricList(nn.Module):
    """Compute several kinds of metrics."""

    def __init__(self, rec_metrics: list[RecMetric]) -> None:
        super().__init__()
        self.rec_metrics = nn.ModuleList(rec_metrics)

    def __len__(self) -> int:
        return len(self.rec_metrics)

    def __getitem__(self, place: int) -> RecMetric:
        return self.rec_metrics[place]

    def get_required_inputs(self) -> list[str]:
        """Return the names of further tensors that are needed: none."""
        return []

    def update(self, *, predictions: Values, labels: Values, weights: Values | None, **kwargs: Any) -> None:
        """Add a batch to all."""
        for metric in self.rec_metrics:
            metric.update(predictions=predictions, labels=labels, weights=weights, **kwargs)

    def compute(self) -> dict[str, torch.Tensor]:
        """Return all metrics by key. Collective."""
        return {key: value for metric in self.rec_metrics for key, value in metric.compute().items()}

    def local_compute(self) -> dict[str, torch.Tensor]:
        """Return all metrics of this rank's samples by key."""
        return {key: value for metric in self.rec_metrics for key, value in metric.local_compute().items()}

    def reset(self) -> None:
        """Forget everything."""
        for metric in self.rec_metrics:
            metric.reset()
