"""The area under the ROC curve of the last samples.

>>> scores, labels, weights = torch.tensor([[0.1, 0.4, 0.4]]), torch.tensor([[0, 0, 1]]), torch.ones(1, 3)
>>> compute_auc(1, [scores], [labels], [weights]).tolist()
[0.75]
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from tessera import comm
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from tessera.metrics.rec_metric import MetricComputationReport, RecMetric

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


class AUCMetricComputation(nn.Module):
    """Keep the last samples of one task."""

    def __init__(
        self, my_rank: int, window_size: int, compute_on_all_ranks: bool, group, **options: Any
    ) -> None:
        super().__init__()
        wrong = [name for name, value in options.items() if value]
        if wrong:
            raise ValueError(f"metrics.auc: there is no {wrong[0]}.")
        self._my_rank = my_rank
        self._on_all_ranks = compute_on_all_ranks
        self._group = group
        self._size = window_size
        self._count = 0
        self._batches: deque[torch.Tensor] = deque()

    def update(self, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
        """Add a batch."""
        batch = torch.stack([part.detach().double() for part in (predictions, labels, weights)])
        self._batches.append(batch)
        self._count += batch.size(1)
        while self._count - self._batches[0].size(1) >= self._size:
            self._count -= self._batches.popleft().size(1)

    def _samples(self) -> torch.Tensor:
        if not self._batches:
            return torch.zeros(3, 0, dtype=torch.float64)
        return torch.cat(list(self._batches), dim=1)[:, -self._size :]

    def _report(self, samples: torch.Tensor) -> list[MetricComputationReport]:
        area = _area(*samples) if samples.size(1) else torch.tensor(0.5)
        return [MetricComputationReport(MetricName.AUC, MetricPrefix.WINDOW, area.float().reshape(1))]

    def local_compute(self) -> list[MetricComputationReport]:
        """Return the area of this rank's samples."""
        return self._report(self._samples())

    def compute(self) -> list[MetricComputationReport]:
        """Return the area of all ranks' samples: on rank 0, or on all if asked for. Collective."""
        samples = self._samples()
        if self._group is not None and self._group.size() > 1:
            samples = comm.all_gather_v(samples.T.contiguous(), self._group).T
        if self._my_rank != 0 and not self._on_all_ranks:
            return []
        return self._report(samples)

    def reset(self) -> None:
        """Forget everything."""
        self._batches.clear()
        self._count = 0


class AUCMetric(RecMetric):
    """Compute the area under the ROC curve of the last `window_size` samples of all ranks.

    Equal scores count half, whatever their order.
    """

    _namespace = MetricNamespace.AUC
    _computation_class = AUCMetricComputation
