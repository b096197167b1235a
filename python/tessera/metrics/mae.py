"""The mean absolute error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["MAEMetric", "MAEMetricComputation"]


class MAEMetricComputation(SummedComputation):
    """Add up absolute errors and samples."""

    SUMS: ClassVar = ("error_sum", "weighted_num_samples")

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        errors = (weights * (labels - predictions).abs()).sum(-1)
        return {"error_sum": errors, "weighted_num_samples": weights.sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.MAE: compute_calibration(sums["error_sum"], sums["weighted_num_samples"])}


class MAEMetric(RecMetric):
    """Compute the weighted mean absolute error; 0 without samples."""

    _namespace = MetricNamespace.MAE
    _computation_class = MAEMetricComputation
