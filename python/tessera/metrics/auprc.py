"""The area under the curve of precision over recall, of the last samples.

>>> scores, labels = torch.tensor([[0.9, 0.5, 0.1]]), torch.tensor([[1.0, 0.0, 1.0]])
>>> round(compute_auprc(1, scores, labels, torch.ones(1, 3)).item(), 4)
0.8333
"""

from __future__ import annotations

from typing import ClassVar

import torch

from tessera.metrics._samples import SampledComputation, SampledMetric
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace

__all__ = ["AUPRCMetric", "AUPRCMetricComputation", "compute_auprc"]


def _area(predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum over thresholds of precision times the recall that they add; 0 without positives."""
    order = predictions.argsort(descending=True)
    scores, marks, counts = predictions[order], labels[order].double(), weights[order].double()
    is_last = torch.ones_like(scores, dtype=torch.bool)
    is_last[:-1] = scores[1:] != scores[:-1]
    hits, all_said = (counts * marks).cumsum(0)[is_last], counts.cumsum(0)[is_last]
    if not hits[-1]:
        return torch.zeros((), dtype=torch.float64)
    recall = torch.cat([hits.new_zeros(1), hits]) / hits[-1]
    return (recall.diff() * torch.nan_to_num(hits / all_said, 1.0)).sum()


def compute_auprc(
    n_tasks: int, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the area of each task; tensors are [tasks, samples]."""
    tasks = zip(predictions, labels, weights, strict=True)
    return torch.stack([_area(*task) for task in tasks]).float()


class AUPRCMetricComputation(SampledComputation):
    """Keep the last samples of one task."""

    NAME: ClassVar = MetricName.AUPRC
    GROUPED_NAME: ClassVar = MetricName.GROUPED_AUPRC

    def _number(self, predictions, labels, weights) -> torch.Tensor:
        return _area(predictions, labels, weights)


class AUPRCMetric(SampledMetric):
    """Compute the area under the curve of precision over recall of the last samples of all ranks."""

    GROUPED: ClassVar = "grouped_auprc"
    _namespace = MetricNamespace.AUPRC
    _computation_class = AUPRCMetricComputation
