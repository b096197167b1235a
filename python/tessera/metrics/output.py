"""Outputs of the model as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._latest import LatestBatch
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from tessera.metrics.rec_metric import MetricComputationReport, RecMetric

__all__ = ["OutputMetric", "OutputMetricComputation"]

_OUTPUTS = ("latest_imp", "total_latest_imp")


class OutputMetricComputation(LatestBatch):
    """Keep the mean of each output of the last batch; ranks add up."""

    SUMS: ClassVar = _OUTPUTS

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {}

    def _sums_with(self, predictions, labels, weights, inputs) -> Mapping[str, torch.Tensor]:
        return {name: inputs[name].float().mean(dtype=torch.float64) for name in _OUTPUTS}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {}

    def _reports(self, totals: torch.Tensor, last: torch.Tensor) -> list[MetricComputationReport]:
        return [
            MetricComputationReport(MetricName.OUTPUT, MetricPrefix.DEFAULT, value, f"_{name}")
            for name, value in self._parts(totals).items()
        ]


class OutputMetric(RecMetric):
    """Tell the means of `latest_imp` and `total_latest_imp` of the last batch."""

    _namespace = MetricNamespace.OUTPUT
    _computation_class = OutputMetricComputation

    def get_required_inputs(self) -> set[str]:
        """Return the names of the outputs."""
        return set(_OUTPUTS)
