"""The rate of clicks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["CTRMetric", "CTRMetricComputation"]


class CTRMetricComputation(SummedComputation):
    """Add up labels and samples."""

    SUMS: ClassVar = ("ctr_num", "ctr_denom")

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        return {"ctr_num": (labels * weights).sum(-1), "ctr_denom": weights.sum(-1)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.CTR: compute_calibration(sums["ctr_num"], sums["ctr_denom"])}


class CTRMetric(RecMetric):
    """Compute the weighted mean label."""

    _namespace = MetricNamespace.CTR
    _computation_class = CTRMetricComputation
