"""The weighted mean of a tensor that the model returns beside its predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_config import RecTaskInfo
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric, RecMetricException
from tessera.metrics.weighted_avg import get_mean

__all__ = ["TensorWeightedAvgMetric", "TensorWeightedAvgMetricComputation"]


class TensorWeightedAvgMetricComputation(SummedComputation):
    """Add up the task's tensor and samples; without `weighted` each sample weighs 1."""

    SUMS: ClassVar = ("weighted_sum", "weighted_num_samples")

    def __init__(self, *args: Any, task: RecTaskInfo, description: str | None = None) -> None:
        super().__init__(*args)
        self._task = task
        self._description = description

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {"weighted_sum": (predictions * weights).sum(-1), "weighted_num_samples": weights.sum(-1)}

    def _sums_with(self, predictions, labels, weights, inputs) -> Mapping[str, torch.Tensor]:
        counts = weights if self._task.weighted else torch.ones_like(weights)
        return self._sums(inputs[self._task.tensor_name].double(), labels, counts)

    def _numbers(self, sums) -> dict[tuple[MetricName, str | None], torch.Tensor]:
        mean = get_mean(sums["weighted_sum"], sums["weighted_num_samples"])
        return {(MetricName.WEIGHTED_AVG, self._description): mean}


class TensorWeightedAvgMetric(RecMetric):
    """Compute the weighted mean of the tensor that a task names by `tensor_name`."""

    _namespace = MetricNamespace.WEIGHTED_AVG
    _computation_class = TensorWeightedAvgMetricComputation

    def _get_task_kwargs(self, task_config: RecTaskInfo) -> dict[str, Any]:
        if task_config.tensor_name is None:
            raise RecMetricException(f"metrics.weighted_avg: task {task_config.name!r} has no tensor_name.")
        return {"task": task_config}

    def get_required_inputs(self) -> set[str]:
        """Return the names of the tasks' tensors."""
        return {task.tensor_name for task in self._tasks}
