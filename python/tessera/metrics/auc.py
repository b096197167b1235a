"""The area under the ROC curve of the last samples.

>>> scores, labels, weights = torch.tensor([[0.1, 0.4, 0.4]]), torch.tensor([[0, 0, 1]]), torch.ones(1, 3)
>>> compute_auc(1, [scores], [labels], [weights]).tolist()
[0.75]
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tessera.metrics._samples import SampledComputation, SampledMetric
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace

__all__ = ["AUCMetric", "AUCMetricComputation", "compute_auc"]


def _area(predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the area, in double precision; samples of one score are one point of the curve."""
    order = predictions.argsort(descending=True)
    scores, marks, counts = predictions[order], labels[order].double(), weights[order].double()
    hits, misses = (counts * marks).cumsum(0), (counts * (1.0 - marks)).cumsum(0)
    is_last = torch.ones_like(scores, dtype=torch.bool)
    is_last[:-1] = scores[1:] != scores[:-1]
    zero = hits.new_zeros(1)
    hits, misses = torch.cat([zero, hits[is_last]]), torch.cat([zero, misses[is_last]])
    whole = hits[-1] * misses[-1]
    if not whole:
        return torch.tensor(0.5, dtype=torch.float64)
    return torch.trapezoid(hits, misses) / whole


def compute_auc(
    n_tasks: int,
    predictions: list[torch.Tensor],
    labels: list[torch.Tensor],
    weights: list[torch.Tensor],
    apply_bin: bool = False,
) -> torch.Tensor:
    """Return the area of each task, 0.5 if a class is missing; tensors are [tasks, samples], by batch."""
    parts = [torch.cat(list(given), dim=-1) for given in (predictions, labels, weights)]
    return torch.stack([_area(*(part[task] for part in parts)) for task in range(n_tasks)]).float()


class AUCMetricComputation(SampledComputation):
    """Keep the last samples of one task."""

    NAME: ClassVar = MetricName.AUC
    GROUPED_NAME: ClassVar = MetricName.GROUPED_AUC

    def __init__(self, *args: Any, grouped: bool = False, **options: Any) -> None:
        wrong = [name for name, value in options.items() if value]
        if wrong:
            raise ValueError(f"metrics.auc: there is no {wrong[0]}.")
        super().__init__(*args, grouped=grouped)

    def _number(self, predictions, labels, weights) -> torch.Tensor:
        return _area(predictions, labels, weights)


class AUCMetric(SampledMetric):
    """Compute the area under the ROC curve of the last `window_size` samples of all ranks.

    Equal scores count half, whatever their order.
    """

    GROUPED: ClassVar = "grouped_auc"
    _namespace = MetricNamespace.AUC
    _computation_class = AUCMetricComputation
