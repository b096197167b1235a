"""Normalised entropy with every sample weighing 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.ne import NEMetricComputation
from tessera.metrics.rec_metric import RecMetric

__all__ = ["UnweightedNEMetric", "UnweightedNEMetricComputation"]


class UnweightedNEMetricComputation(NEMetricComputation):
    """Add up cross entropies and labels."""

    NAME: ClassVar = MetricName.UNWEIGHTED_NE

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return super()._sums(predictions, labels, torch.ones_like(weights))


class UnweightedNEMetric(RecMetric):
    """Compute the normalised entropy; weights are not used."""

    _namespace = MetricNamespace.UNWEIGHTED_NE
    _computation_class = UnweightedNEMetricComputation
