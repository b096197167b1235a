"""The weighted sum of predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["WeightedSumPredictionsMetric", "WeightedSumPredictionsMetricComputation"]


class WeightedSumPredictionsMetricComputation(SummedComputation):
    """Add it up."""

    SUMS: ClassVar = ("weighted_predictions_sum",)

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {"weighted_predictions_sum": (weights * predictions.nan_to_num(0.0)).sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.WEIGHTED_SUM_PREDICTIONS: sums["weighted_predictions_sum"]}


class WeightedSumPredictionsMetric(RecMetric):
    """Compute the weighted sum of predictions; NaN counts none."""

    _namespace = MetricNamespace.WEIGHTED_SUM_PREDICTIONS
    _computation_class = WeightedSumPredictionsMetricComputation
