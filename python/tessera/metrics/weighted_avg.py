"""The weighted mean of predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["WeightedAvgMetric", "WeightedAvgMetricComputation", "get_mean"]


def get_mean(value_sum: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
    """Return the mean; NaN without samples."""
    return value_sum / num_samples


class WeightedAvgMetricComputation(SummedComputation):
    """Add up predictions and samples."""

    SUMS: ClassVar = ("weighted_sum", "weighted_num_samples")

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {"weighted_sum": (predictions * weights).sum(-1), "weighted_num_samples": weights.sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.WEIGHTED_AVG: get_mean(sums["weighted_sum"], sums["weighted_num_samples"])}


class WeightedAvgMetric(RecMetric):
    """Compute the weighted mean prediction."""

    _namespace = MetricNamespace.WEIGHTED_AVG
    _computation_class = WeightedAvgMetricComputation
