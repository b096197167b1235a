"""Calibration of predictions whose odds are multiplied by a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessera.metrics.calibration import CalibrationMetricComputation
from tessera.metrics.metrics_namespace import MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["RecalibratedCalibrationMetric", "RecalibratedCalibrationMetricComputation", "recalibrate"]


def recalibrate(predictions: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return the predictions with their odds p / (1 - p) multiplied.

    >>> recalibrate(torch.tensor([0.5]), 3.0).tolist()
    [0.75]
    """
    return predictions / (predictions + (1.0 - predictions) / coefficient)


class RecalibratedCalibrationMetricComputation(CalibrationMetricComputation):
    """Add up recalibrated predictions and labels."""

    def __init__(self, *args: Any, recalibration_coefficient: float = 1.0) -> None:
        super().__init__(*args)
        self._coefficient = recalibration_coefficient

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return super()._sums(recalibrate(predictions, self._coefficient), labels, weights)


class RecalibratedCalibrationMetric(RecMetric):
    """Compute predicted over observed clicks after recalibration."""

    _namespace = MetricNamespace.RECALIBRATED_CALIBRATION
    _computation_class = RecalibratedCalibrationMetricComputation
