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
    compose_customized_metric_key,
    compose_metric_namespace,
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


def has_others(group: dist.ProcessGroup | None) -> bool:
    """Tell whether there are other ranks to add up with."""
    return group is not None and group.size() > 1


class Synced(abc.ABC):
    """Let the state of all ranks' samples stand in the place of this rank's for a while."""

    _group: dist.ProcessGroup | None
    _own: torch.Tensor | None = None  # this rank's state, while that of all ranks stands in its place

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

    def _check_own(self) -> None:
        if self._own is not None:
            raise RecMetricException(
                "metrics: a batch came between sync and unsync and would be lost. Call unsync first."
            )


class RecMetricComputation(Synced, nn.Module):
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

    def update(
        self,
        predictions: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Add a batch."""
        self._check_own()
        self._add(predictions, labels, weights, inputs or {})

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
        kwargs.pop("batch_size_stages", None)  # samples are counted as they come
        self._tasks = tasks
        self._batch_size = batch_size
        self._options = kwargs
        self._metrics_computations = nn.ModuleList(
            self._computation_class(
                my_rank,
                math.ceil(window_size / world_size),
                compute_on_all_ranks,
                _group_of(process_group, world_size),
                **self._task_options(task),
                **kwargs,
            )
            for task in tasks
        )

    def _task_options(self, task: RecTaskInfo) -> dict[str, Any]:
        """Return what the computation of a task is made with besides the options of all."""
        return {}

    def _check_sizes(self, task: RecTaskInfo, predictions: torch.Tensor, labels: torch.Tensor | None) -> None:
        count = 0 if labels is None else labels.numel()
        if count != predictions.numel() or labels is None:
            raise RecMetricException(
                f"metrics.{self._namespace}: task {task.name!r} has {predictions.numel()} predictions and "
                f"{count} labels."
            )

    def _inputs(self, given: Mapping[str, torch.Tensor], task: RecTaskInfo) -> dict[str, torch.Tensor]:
        needed = self.get_required_inputs()
        missing = sorted(name for name in needed if given.get(name) is None)
        if missing:
            raise RecMetricException(
                f"metrics.{self._namespace}: task {task.name!r} needs {missing[0]!r} among required_inputs."
            )
        return {name: given[name].reshape(-1) for name in needed}

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
            self._check_sizes(task, given, marks)
            counts = self._of_task(weights, task, place)
            counts = torch.ones_like(marks, dtype=given.dtype) if counts is None else counts
            inputs = self._inputs(kwargs.get("required_inputs") or {}, task)
            with torch.no_grad():
                computation.update(self._flat(given), marks.reshape(-1), counts.reshape(-1), inputs)

    def _flat(self, predictions: torch.Tensor) -> torch.Tensor:
        return predictions.reshape(-1)

    def _named(
        self, reports: list[list[MetricComputationReport]], whose: str = ""
    ) -> dict[str, torch.Tensor]:
        return {
            compose_customized_metric_key(
                compose_metric_namespace(self._namespace, task.name),
                f"{whose}{report.metric_prefix}{report.name}",
                report.description,
            ): report.value
            for task, found in zip(self._tasks, reports, strict=True)
            for report in found
        }

    def compute(self) -> dict[str, torch.Tensor]:
        """Return the metrics by key: on rank 0, or on all ranks if asked for. Collective."""
        return self._named([computation.compute() for computation in self._metrics_computations])

    def local_compute(self) -> dict[str, torch.Tensor]:
        """Return the metrics of this rank's samples by key, which says so: `ne-task|local_window_ne`."""
        reports = [computation.local_compute() for computation in self._metrics_computations]
        return self._named(reports, "local_")

    def sync(self) -> None:
        """Let the state be that of all ranks' samples, to be saved, until `unsync`. Collective."""
        for computation in self._metrics_computations:
            computation.sync()

    def unsync(self) -> None:
        """Let the state be that of this rank's samples again."""
        for computation in self._metrics_computations:
            if computation._is_synced:
                computation.unsync()

    def reset(self) -> None:
        """Forget everything."""
        for computation in self._metrics_computations:
            computation.reset()

    def get_required_inputs(self) -> set[str]:
        """Return the names of further tensors of a batch that are needed, as `required_inputs` of update."""
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
        """Return the names of further tensors of a batch that are needed."""
        return sorted({name for metric in self.rec_metrics for name in metric.get_required_inputs()})

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

    def sync(self) -> None:
        """Let the states be those of all ranks' samples, until `unsync`. Collective."""
        for metric in self.rec_metrics:
            metric.sync()

    def unsync(self) -> None:
        """Let the states be those of this rank's samples again."""
        for metric in self.rec_metrics:
            metric.unsync()

    def reset(self) -> None:
        """Forget everything."""
        for metric in self.rec_metrics:
            metric.reset()
