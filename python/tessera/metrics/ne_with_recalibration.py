"""Normalised entropy of predictions whose odds are multiplied by a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessera.metrics.calibration_with_recalibration import recalibrate
from tessera.metrics.metrics_namespace import MetricNamespace
from tessera.metrics.ne import NEMetricComputation
from tessera.metrics.rec_metric import RecMetric

__all__ = ["RecalibratedNEMetric", "RecalibratedNEMetricComputation"]


class RecalibratedNEMetricComputation(NEMetricComputation):
    """Add up cross entropies of recalibrated predictions, and labels."""

    def __init__(self, *args: Any, recalibration_coefficient: float = 1.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._coefficient = recalibration_coefficient

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return super()._sums(recalibrate(predictions, self._coefficient), labels, weights)


class RecalibratedNEMetric(RecMetric):
    """Compute the normalised entropy after recalibration."""

    _namespace = MetricNamespace.RECALIBRATED_NE
    _computation_class = RecalibratedNEMetricComputation
