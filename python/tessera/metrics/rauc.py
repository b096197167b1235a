"""The share of pairs in the right order, for labels of any value, of the last samples.

>>> compute_rauc(1, [torch.tensor([[0.1, 0.2, 0.3]])], [torch.tensor([[1.0, 3.0, 2.0]])], []).tolist()
[0.6666666865348816]
"""

from __future__ import annotations

from typing import ClassVar

import torch

from tessera.metrics._samples import SampledComputation, SampledMetric
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace

__all__ = ["RAUCMetric", "RAUCMetricComputation", "compute_rauc"]


def _inversions(values: torch.Tensor) -> int:
    """Count the pairs of which the first is larger, by merging sorted runs of doubling length."""
    length = 1 << max(values.numel() - 1, 0).bit_length()
    runs = torch.full((length,), torch.inf, dtype=torch.float64)
    runs[: values.numel()] = values
    found, width = 0, 1
    while width < length:
        left, right = (part.contiguous() for part in runs.view(-1, 2, width).unbind(1))
        not_larger = torch.searchsorted(left, right, right=True)
        found += int((width - not_larger)[right.isfinite()].sum())
        runs = runs.view(-1, 2 * width).sort(dim=-1).values.view(-1)
        width *= 2
    return found


def _share(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    count = labels.numel()
    if count < 2:
        return torch.tensor(1.0, dtype=torch.float64)
    by_label = labels.argsort(stable=True)
    order = by_label[predictions[by_label].argsort(stable=True)]
    wrong = _inversions(labels[order].double().cpu())
    return torch.tensor(1.0 - wrong / (count * (count - 1) / 2), dtype=torch.float64)


def compute_rauc(
    n_tasks: int, predictions: list[torch.Tensor], labels: list[torch.Tensor], weights: list[torch.Tensor]
) -> torch.Tensor:
    """Return the share of each task; tensors are [tasks, samples], by batch. Weights are not used."""
    scores, marks = (torch.cat(list(given), dim=-1) for given in (predictions, labels))
    return torch.stack([_share(scores[task], marks[task]) for task in range(n_tasks)]).float()


class RAUCMetricComputation(SampledComputation):
    """Keep the last samples of one task."""

    NAME: ClassVar = MetricName.RAUC
    GROUPED_NAME: ClassVar = MetricName.GROUPED_RAUC

    def _number(self, predictions, labels, weights) -> torch.Tensor:
        return _share(predictions, labels)


class RAUCMetric(SampledMetric):
    """Compute the share of pairs of the last samples whose labels rise with the predictions."""

    GROUPED: ClassVar = "grouped_rauc"
    _namespace = MetricNamespace.RAUC
    _computation_class = RAUCMetricComputation
