"""The share of positive samples that are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric, RecMetricComputation

__all__ = ["RecallMetric", "RecallMetricComputation"]


class RecallMetricComputation(RecMetricComputation):
    """Add up right and wrong answers; a prediction of `threshold` or more says 1."""

    SUMS: ClassVar = ("true_pos_sum", "false_neg_sum")

    def __init__(self, *args: Any, threshold: float = 0.5) -> None:
        super().__init__(*args)
        self._threshold = threshold

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        says_so = predictions >= self._threshold
        return {
            "true_pos_sum": (weights * (says_so * labels)).sum(-1),
            "false_neg_sum": (weights * (~says_so * labels)).sum(-1),
        }

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        right, wrong = sums["true_pos_sum"], sums["false_neg_sum"]
        return {MetricName.RECALL: compute_calibration(right, right + wrong)}


class RecallMetric(RecMetric):
    """Compute right positives over all positive samples; 0 if there are none."""

    _namespace = MetricNamespace.RECALL
    _computation_class = RecallMetricComputation
