"""Normalised entropy: the cross entropy of predictions over that of the mean label.

>>> import torch
>>> from tessera.metrics.metrics_config import RecTaskInfo
>>> metric = NEMetric(1, 0, 2, [RecTaskInfo("t")])
>>> metric.update(predictions=torch.tensor([0.5, 0.5]), labels=torch.tensor([0.0, 1.0]), weights=None)
>>> metric.compute()["ne-t|lifetime_ne"].tolist()
[1.0]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = [
    "ETA",
    "NEMetric",
    "NEMetricComputation",
    "compute_cross_entropy",
    "compute_logloss",
    "compute_ne",
    "get_ne_states",
]

ETA = 1e-12  # predictions and mean labels stay this far off 0 and 1


def compute_cross_entropy(
    labels: torch.Tensor, predictions: torch.Tensor, weights: torch.Tensor, eta: float
) -> torch.Tensor:
    """Return the weighted cross entropy of each sample, in bits; predictions stay `eta` off 0 and 1."""
    chances = predictions.double().clamp(eta, 1 - eta)
    return -weights * (labels * torch.log2(chances) + (1.0 - labels) * torch.log2(1.0 - chances))


def compute_ne(
    ce_sum: torch.Tensor,
    weighted_num_samples: torch.Tensor,
    pos_labels: torch.Tensor,
    neg_labels: torch.Tensor,
    eta: float,
    allow_missing_label_with_zero_weight: bool = False,
) -> torch.Tensor:
    """Return the cross entropy over that of predicting the mean label; NaN without samples."""
    if allow_missing_label_with_zero_weight and not weighted_num_samples.all():
        return torch.full_like(ce_sum, eta)
    mean = (pos_labels / weighted_num_samples).clamp(eta, 1 - eta)
    return ce_sum / -(pos_labels * torch.log2(mean) + neg_labels * torch.log2(1.0 - mean))


def get_ne_states(
    labels: torch.Tensor, predictions: torch.Tensor, weights: torch.Tensor, eta: float
) -> dict[str, torch.Tensor]:
    """Return what samples add to the sums, over the last dimension."""
    return {
        "cross_entropy_sum": compute_cross_entropy(labels, predictions, weights, eta).sum(-1),
        "weighted_num_samples": weights.sum(-1),
        "pos_labels": (weights * labels).sum(-1),
        "neg_labels": (weights * (1.0 - labels)).sum(-1),
    }


def compute_logloss(
    ce_sum: torch.Tensor, pos_labels: torch.Tensor, neg_labels: torch.Tensor, eta: float
) -> torch.Tensor:
    """Return the mean cross entropy of a sample, in bits."""
    return ce_sum / (pos_labels + neg_labels).clamp(min=eta)


class NEMetricComputation(SummedComputation):
    """Add up cross entropies and labels. With `include_logloss` the mean cross entropy is told, too."""

    SUMS: ClassVar = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")
    NAME: ClassVar = MetricName.NE

    def __init__(
        self, *args: Any, include_logloss: bool = False, allow_missing_label_with_zero_weight: bool = False
    ) -> None:
        super().__init__(*args)
        self._include_logloss = include_logloss
        self._allow_missing = allow_missing_label_with_zero_weight

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return get_ne_states(labels, predictions, weights, ETA)

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        entropy, count, positive, negative = (sums[name] for name in NEMetricComputation.SUMS)
        found = {self.NAME: compute_ne(entropy, count, positive, negative, ETA, self._allow_missing)}
        if self._include_logloss:
            found[MetricName.LOG_LOSS] = compute_logloss(entropy, positive, negative, ETA)
        return found


class NEMetric(RecMetric):
    """Compute the normalised entropy: below 1 is better than knowing only the mean."""

    _namespace = MetricNamespace.NE
    _computation_class = NEMetricComputation
