"""The share of samples that a threshold puts on the right side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["AccuracyMetric", "AccuracyMetricComputation"]


class AccuracyMetricComputation(SummedComputation):
    """Add up right answers and samples; a prediction of `threshold` or more says 1."""

    SUMS: ClassVar = ("accuracy_sum", "weighted_num_samples")

    def __init__(self, *args: Any, threshold: float = 0.5) -> None:
        super().__init__(*args)
        self._threshold = threshold

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        right = (predictions >= self._threshold) == labels
        return {"accuracy_sum": (weights * right).sum(-1), "weighted_num_samples": weights.sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.ACCURACY: compute_calibration(sums["accuracy_sum"], sums["weighted_num_samples"])}


class AccuracyMetric(RecMetric):
    """Compute the weighted share of right answers; 0 without samples."""

    _namespace = MetricNamespace.ACCURACY
    _computation_class = AccuracyMetricComputation
