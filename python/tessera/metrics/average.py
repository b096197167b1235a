"""The mean label and the mean prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["AverageMetric", "AverageMetricComputation"]


class AverageMetricComputation(SummedComputation):
    """Add up labels, predictions and samples."""

    SUMS: ClassVar = ("label_sum", "prediction_sum", "weighted_num_samples")

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {
            "label_sum": (labels * weights).sum(-1),
            "prediction_sum": (predictions * weights).sum(-1),
            "weighted_num_samples": weights.sum(-1),
        }

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        count = sums["weighted_num_samples"]
        return {
            MetricName.LABEL_AVERAGE: compute_calibration(sums["label_sum"], count),
            MetricName.PREDICTION_AVERAGE: compute_calibration(sums["prediction_sum"], count),
        }


class AverageMetric(RecMetric):
    """Compute the weighted mean of labels and of predictions; 0 without samples."""

    _namespace = MetricNamespace.AVERAGE
    _computation_class = AverageMetricComputation
