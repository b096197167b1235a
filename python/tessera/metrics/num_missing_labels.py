"""The weighted number of samples without a label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["NumMissingLabelsMetric", "NumMissingLabelsMetricComputation"]


class NumMissingLabelsMetricComputation(SummedComputation):
    """Add it up."""

    SUMS: ClassVar = ("missing_label_sum",)

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {"missing_label_sum": (weights * labels.isnan()).sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.NUM_MISSING_LABELS: sums["missing_label_sum"]}


class NumMissingLabelsMetric(RecMetric):
    """Compute the weight of samples whose label is NaN."""

    _namespace = MetricNamespace.NUM_MISSING_LABELS
    _computation_class = NumMissingLabelsMetricComputation
