"""Metrics of several tasks, and what is told of them.

A metric of one's own names its computation, see RecMetricComputation, and its namespace.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from tessera.metrics._computation import (
    MAX_BUFFER_COUNT,
    MetricComputationReport,
    RecMetricComputation,
    RecMetricException,
    WindowBuffer,
)
from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_config import RecComputeMode, RecTaskInfo
from tessera.metrics.metrics_namespace import (
    MetricNamespaceBase,
    compose_customized_metric_key,
    compose_metric_namespace,
)

__all__ = [
    "MAX_BUFFER_COUNT",
    "MetricComputationReport",
    "RecMetric",
    "RecMetricComputation",
    "RecMetricException",
    "RecMetricList",
    "WindowBuffer",
]

Values = torch.Tensor | Mapping[str, torch.Tensor]

_FUSED = (RecComputeMode.FUSED_TASKS_COMPUTATION, RecComputeMode.FUSED_TASKS_AND_STATES_COMPUTATION)


def _group_of(group: dist.ProcessGroup | None, world_size: int) -> dist.ProcessGroup | None:
    if group is None and world_size > 1 and dist.is_initialized():
        return dist.group.WORLD
    return group


class RecMetric(nn.Module, abc.ABC):
    """Compute one kind of metric for several tasks.

    `window_size` is in samples of all ranks; `process_group` is the world if left out.
    """

    _namespace: MetricNamespaceBase
    _computation_class: type[SummedComputation] | type[RecMetricComputation]

    PREDICTIONS: ClassVar = "predictions"
    LABELS: ClassVar = "labels"
    WEIGHTS: ClassVar = "weights"

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
        self._world_size = world_size
        self._my_rank = my_rank
        self._tasks = tasks
        self._batch_size = batch_size
        self._window_size = math.ceil(window_size / world_size)
        self._options = kwargs
        self._required_inputs: set[str] = set()
        self._follows_protocol = issubclass(self._computation_class, RecMetricComputation)
        self._metrics_computations = nn.ModuleList()
        if not self._follows_protocol:
            for task in tasks:
                computation = self._computation_class(
                    my_rank,
                    self._window_size,
                    compute_on_all_ranks,
                    _group_of(process_group, world_size),
                    **self._get_task_kwargs(task),
                    **kwargs,
                )
                self._metrics_computations.append(computation)
            return
        is_fused = compute_mode in _FUSED
        for part in [tasks] if is_fused else tasks:
            computation = self._computation_class(
                my_rank=my_rank,
                batch_size=batch_size,
                n_tasks=len(tasks) if is_fused else 1,
                window_size=self._window_size,
                compute_on_all_ranks=compute_on_all_ranks,
                should_validate_update=should_validate_update,
                compute_mode=compute_mode,
                process_group=process_group,
                **{"fused_update_limit": fused_update_limit, **kwargs, **self._get_task_kwargs(part)},
            )
            self._metrics_computations.append(computation)
            self._required_inputs |= self._get_task_required_inputs(part)

    def _get_task_kwargs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> dict[str, Any]:
        """Return what the computation of a task is made with besides the options of all."""
        return {}

    def _get_task_required_inputs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> set[str]:
        """Return the names of further tensors that a computation of one's own needs for a task."""
        return set()

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
        if self._follows_protocol:
            self._update_by_protocol(predictions, labels, weights, kwargs)
            return
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

    def _update_by_protocol(
        self, predictions: Values, labels: Values, weights: Values | None, others: dict[str, Any]
    ) -> None:
        """Hand each computation the tensors of its tasks, as [tasks, samples]."""
        given = others.get("required_inputs")
        fused = len(self._tasks) != len(self._metrics_computations)
        groups = [self._tasks] if fused else [[task] for task in self._tasks]
        for tasks, computation in zip(groups, self._metrics_computations, strict=True):
            parts = [self._rows(values, tasks) for values in (predictions, labels, weights)]
            if parts[0] is None or not parts[0].numel():
                continue
            rows, marks, counts = parts
            if marks is None:
                raise RecMetricException(f"metrics.{self._namespace}: task {tasks[0].name!r} has no labels.")
            marks = marks.reshape(len(tasks), -1)
            is_of_classes = parts[0].dim() > parts[1].dim()
            rows = rows.reshape(len(tasks), -1, *rows.shape[-1:] if is_of_classes else ())
            counts = torch.ones_like(rows) if counts is None else counts.reshape(len(tasks), -1)
            if given is not None and not fused:
                wide = {k: v.expand(marks.shape) if v.numel() == 1 else v for k, v in given.items()}
                others = {**others, "required_inputs": {k: v.view(marks.shape) for k, v in wide.items()}}
            if computation._should_validate_update:
                seen = counts.count_nonzero(-1) > 0
                if not seen.any():
                    continue
                computation.has_valid_update.logical_or_(seen)
            computation.update(predictions=rows, labels=marks, weights=counts, **others)

    def _rows(self, values: Values | None, tasks: list[RecTaskInfo]) -> torch.Tensor | None:
        """Return the tensors of these tasks, one after the other; None if there are none."""
        own = [self._of_task(values, task, self._tasks.index(task)) for task in tasks]
        return None if any(tensor is None for tensor in own) else torch.stack(own)

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

    def _reports(self, scope: str) -> list[list[MetricComputationReport]]:
        """Return what the computations report, by task."""
        if self._follows_protocol:
            for computation in self._metrics_computations:
                computation.pre_compute()
        found = [getattr(computation, f"{scope}compute")() for computation in self._metrics_computations]
        if len(found) == len(self._tasks):
            return found
        return [
            [replace(report, value=report.value[place]) for report in found[0]]
            for place in range(len(self._tasks))
        ]

    def compute(self) -> dict[str, torch.Tensor]:
        """Return the metrics by key: on rank 0, or on all ranks if asked for. Collective."""
        return self._named(self._reports(""))

    def local_compute(self) -> dict[str, torch.Tensor]:
        """Return the metrics of this rank's samples by key, which says so: `ne-task|local_window_ne`."""
        return self._named(self._reports("local_"), "local_")

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
        return self._required_inputs


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
