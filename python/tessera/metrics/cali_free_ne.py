"""Normalised entropy over what the mean prediction would have had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.ne import ETA, compute_ne, get_ne_states
from tessera.metrics.rec_metric import RecMetric

__all__ = ["CaliFreeNEMetric", "CaliFreeNEMetricComputation"]


class CaliFreeNEMetricComputation(SummedComputation):
    """Add up cross entropies, labels and predictions."""

    SUMS: ClassVar = (
        "cross_entropy_sum",
        "weighted_num_samples",
        "pos_labels",
        "neg_labels",
        "weighted_sum_predictions",
    )

    def __init__(self, *args: Any, allow_missing_label_with_zero_weight: bool = False) -> None:
        super().__init__(*args)
        self._allow_missing = allow_missing_label_with_zero_weight

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        added = get_ne_states(labels, predictions, weights, ETA)
        return {**added, "weighted_sum_predictions": (weights * predictions).sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        entropy, count, positive, negative, predicted = sums.values()
        if self._allow_missing and not count.all():
            return {MetricName.CALI_FREE_NE: torch.full_like(entropy, ETA)}
        mean = predicted / count
        plain = -(positive * torch.log2(mean) + (count - positive) * torch.log2(1.0 - mean))
        return {MetricName.CALI_FREE_NE: compute_ne(entropy, count, positive, negative, ETA) / plain}


class CaliFreeNEMetric(RecMetric):
    """Compute the normalised entropy without what a wrong mean prediction costs."""

    _namespace = MetricNamespace.CALI_FREE_NE
    _computation_class = CaliFreeNEMetricComputation
