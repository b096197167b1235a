"""Whatever is given as the label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._latest import LatestBatch
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["ScalarMetric", "ScalarMetricComputation"]


class ScalarMetricComputation(LatestBatch):
    """Keep the mean of the labels of a batch."""

    SUMS: ClassVar = ("labels", "window_count")

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {"labels": labels.mean(-1), "window_count": torch.ones(())}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.SCALAR: sums["labels"] / sums["window_count"].clamp_min(1.0)}


class ScalarMetric(RecMetric):
    """Tell the mean label: that of the last batch, and over the window that of its batches.

    >>> from tessera.metrics.metrics_config import RecTaskInfo
    >>> metric = ScalarMetric(1, 0, 1, [RecTaskInfo("T")])
    >>> for value in (2.0, 4.0):
    ...     metric.update(predictions=torch.zeros(1), labels=torch.tensor([value]), weights=None)
    >>> {key: value.item() for key, value in metric.compute().items()}
    {'scalar-T|lifetime_scalar': 4.0, 'scalar-T|window_scalar': 3.0}
    """

    _namespace = MetricNamespace.SCALAR
    _computation_class = ScalarMetricComputation
