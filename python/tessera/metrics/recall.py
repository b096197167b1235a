"""The share of positive samples that are found."""

from __future__ import annotations

from typing import ClassVar

import torch

from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.precision import RightPositives
from tessera.metrics.rec_metric import RecMetric

__all__ = ["RecallMetric", "RecallMetricComputation"]


class RecallMetricComputation(RightPositives):
    """Add up right and wrong answers; a prediction of `threshold` or more says 1."""

    SUMS: ClassVar = ("true_pos_sum", "false_neg_sum")
    NAME = MetricName.RECALL

    def _is_wrong(self, says_so: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ~says_so * labels


class RecallMetric(RecMetric):
    """Compute right positives over all positive samples; 0 if there are none."""

    _namespace = MetricNamespace.RECALL
    _computation_class = RecallMetricComputation
