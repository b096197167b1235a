"""The mean squared error over that of always predicting 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["NMSEMetric", "NMSEMetricComputation"]


class NMSEMetricComputation(SummedComputation):
    """Add up squared errors, of the predictions and of the number 1."""

    SUMS: ClassVar = ("error_sum", "weighted_num_samples", "const_pred_error_sum")

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {
            "error_sum": (weights * (labels - predictions).square()).sum(-1),
            "weighted_num_samples": weights.sum(-1),
            "const_pred_error_sum": (weights * (labels - 1.0).square()).sum(-1),
        }

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        mean = compute_calibration(sums["error_sum"], sums["weighted_num_samples"])
        plain = compute_calibration(sums["const_pred_error_sum"], sums["weighted_num_samples"])
        return {
            MetricName.NMSE: compute_calibration(mean, plain),
            MetricName.NRMSE: compute_calibration(mean.sqrt(), plain.sqrt()),
        }


class NMSEMetric(RecMetric):
    """Compute the normalised mean squared error and its root; 0 where 1 is always right."""

    _namespace = MetricNamespace.NMSE
    _computation_class = NMSEMetricComputation
