"""The share of pairs that predictions put in the order of their labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["XAUCMetric", "XAUCMetricComputation"]


class XAUCMetricComputation(SummedComputation):
    """Add up pairs of a batch in the right order, and all its pairs; a pair weighs the product of both."""

    SUMS: ClassVar = ("error_sum", "weighted_num_pairs")

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        places = torch.triu_indices(labels.numel(), labels.numel(), offset=1, device=labels.device)
        first, second = places.unbind(0)
        pairs = weights[first] * weights[second]
        order = torch.sign(predictions[first] - predictions[second])
        right = order == torch.sign(labels[first] - labels[second])
        return {"error_sum": (pairs * right).sum(-1), "weighted_num_pairs": pairs.sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.XAUC: compute_calibration(sums["error_sum"], sums["weighted_num_pairs"])}


class XAUCMetric(RecMetric):
    """Compute the weighted share of pairs of one batch in the right order; ties have to be ties."""

    _namespace = MetricNamespace.XAUC
    _computation_class = XAUCMetricComputation
