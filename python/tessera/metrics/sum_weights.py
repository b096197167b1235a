"""The sum of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["SumWeightsMetric", "SumWeightsMetricComputation"]


class SumWeightsMetricComputation(SummedComputation):
    """Add it up."""

    SUMS: ClassVar = ("weighted_sum",)

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {"weighted_sum": (weights).sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.SUM_WEIGHTS: sums["weighted_sum"]}


class SumWeightsMetric(RecMetric):
    """Compute how much all samples weigh."""

    _namespace = MetricNamespace.SUM_WEIGHTS
    _computation_class = SumWeightsMetricComputation
