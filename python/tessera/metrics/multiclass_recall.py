"""How often the right class is among the first of many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_config import RecTaskInfo
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric, RecMetricException

__all__ = ["MulticlassRecallMetric", "MulticlassRecallMetricComputation", "compute_true_positives_at_k"]


def compute_true_positives_at_k(
    predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, n_classes: int
) -> torch.Tensor:
    """Return, for each k below `n_classes`, the weight of samples whose class is among the first k + 1.

    Predictions are [samples, classes].

    >>> scores = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    >>> compute_true_positives_at_k(scores, torch.tensor([0, 1]), torch.ones(2), 2).tolist()
    [1.0, 2.0]
    """
    order = predictions.argsort(dim=-1, descending=True)[..., :n_classes]
    hits = (order == labels.unsqueeze(-1)) * weights.unsqueeze(-1)
    return hits.sum(-2).cumsum(-1)


class MulticlassRecallMetricComputation(SummedComputation):
    """Add up hits by place, and samples."""

    SUMS: ClassVar = ("tp_at_k", "total_weights")

    def __init__(self, *args: Any, number_of_classes: int) -> None:
        super().__init__(*args, shapes={"tp_at_k": (1, number_of_classes)})
        self._classes = number_of_classes

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        hits = compute_true_positives_at_k(predictions, labels, weights, self._classes)
        return {"tp_at_k": hits, "total_weights": weights.sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.MULTICLASS_RECALL: sums["tp_at_k"] / sums["total_weights"].unsqueeze(-1)}


class MulticlassRecallMetric(RecMetric):
    """Compute the weighted share of samples whose class is among the first k, for each k."""

    _namespace = MetricNamespace.MULTICLASS_RECALL
    _computation_class = MulticlassRecallMetricComputation

    def _check_sizes(self, task: RecTaskInfo, predictions: torch.Tensor, labels: torch.Tensor | None) -> None:
        classes = self._options["number_of_classes"]
        count = 0 if labels is None else labels.numel()
        if labels is None or predictions.numel() != count * classes:
            raise RecMetricException(
                f"metrics.multiclass_recall: task {task.name!r} has {predictions.numel()} predictions for "
                f"{count} labels and {classes} classes."
            )

    def _flat(self, predictions: torch.Tensor) -> torch.Tensor:
        return predictions.reshape(-1, self._options["number_of_classes"])
