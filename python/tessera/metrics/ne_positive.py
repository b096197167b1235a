"""The part of the normalised entropy that positive samples bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.ne import ETA, compute_ne, get_ne_states
from tessera.metrics.rec_metric import RecMetric

__all__ = ["NEPositiveMetric", "NEPositiveMetricComputation"]


class NEPositiveMetricComputation(SummedComputation):
    """Add up the cross entropies of positive samples, and labels."""

    SUMS: ClassVar = ("cross_entropy_positive_sum", "weighted_num_samples", "pos_labels", "neg_labels")

    def __init__(self, *args: Any, allow_missing_label_with_zero_weight: bool = False) -> None:
        super().__init__(*args)
        self._allow_missing = allow_missing_label_with_zero_weight

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        added = get_ne_states(labels, predictions, weights, ETA)
        del added["cross_entropy_sum"]
        bits = torch.log2(predictions.clamp(ETA, 1 - ETA))
        return {"cross_entropy_positive_sum": -(weights * labels * bits).sum(-1), **added}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.NE_POSITIVE: compute_ne(*sums.values(), ETA, self._allow_missing)}


class NEPositiveMetric(RecMetric):
    """Compute the cross entropy of positive samples over that of predicting the mean label for all."""

    _namespace = MetricNamespace.NE_POSITIVE
    _computation_class = NEPositiveMetricComputation
