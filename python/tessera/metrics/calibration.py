"""Calibration: predicted over observed clicks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = [
    "CalibrationMetric",
    "CalibrationMetricComputation",
    "compute_calibration",
    "get_calibration_states",
]


def compute_calibration(calibration_num: torch.Tensor, calibration_denom: torch.Tensor) -> torch.Tensor:
    """Return the ratio; 0 without clicks.

    >>> compute_calibration(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0])).tolist()
    [1.5, 0.0]
    """
    return torch.where(calibration_denom == 0, 0.0, calibration_num / calibration_denom).double()


def get_calibration_states(
    labels: torch.Tensor, predictions: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return what samples add to the sums, over the last dimension."""
    return {
        "calibration_num": (predictions * weights).sum(-1),
        "calibration_denom": (labels * weights).sum(-1),
    }


class CalibrationMetricComputation(SummedComputation):
    """Add up predictions and labels."""

    SUMS: ClassVar = ("calibration_num", "calibration_denom")

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return get_calibration_states(labels, predictions, weights)

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.CALIBRATION: compute_calibration(**sums)}


class CalibrationMetric(RecMetric):
    """Compute predicted over observed clicks: 1 is right."""

    _namespace = MetricNamespace.CALIBRATION
    _computation_class = CalibrationMetricComputation
