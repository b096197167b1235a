"""The mean squared error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["MSEMetric", "MSEMetricComputation"]


class MSEMetricComputation(SummedComputation):
    """Add up squared errors and samples."""

    SUMS: ClassVar = ("error_sum", "weighted_num_samples")

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        errors = (weights * (labels - predictions).square()).sum(-1)
        return {"error_sum": errors, "weighted_num_samples": weights.sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        mean = compute_calibration(sums["error_sum"], sums["weighted_num_samples"])
        return {MetricName.MSE: mean, MetricName.RMSE: mean.sqrt()}


class MSEMetric(RecMetric):
    """Compute the weighted mean squared error, and its root."""

    _namespace = MetricNamespace.MSE
    _computation_class = MSEMetricComputation
