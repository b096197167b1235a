"""The weighted number of positive samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["NumPositiveSamplesMetric", "NumPositiveSamplesMetricComputation"]


class NumPositiveSamplesMetricComputation(SummedComputation):
    """Add it up."""

    SUMS: ClassVar = ("weighted_pos_sum",)

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {"weighted_pos_sum": (weights * labels.nan_to_num(0.0)).sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.NUM_POSITIVE_SAMPLES: sums["weighted_pos_sum"]}


class NumPositiveSamplesMetric(RecMetric):
    """Compute the weight of positive samples; a label that is missing counts none."""

    _namespace = MetricNamespace.NUM_POSITIVE_SAMPLES
    _computation_class = NumPositiveSamplesMetricComputation
