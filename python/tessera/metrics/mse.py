"""The mean squared error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["MSEMetric", "MSEMetricComputation"]


class MSEMetricComputation(SummedComputation):
    """Add up squared errors and samples; with `include_r_squared` labels, too."""

    SUMS: ClassVar = ("error_sum", "weighted_num_samples")

    def __init__(self, *args: Any, include_r_squared: bool = False, **kwargs: Any) -> None:
        self._include_r_squared = include_r_squared
        super().__init__(*args, **kwargs)

    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums."""
        return (*self.SUMS, "label_sum", "label_squared_sum") if self._include_r_squared else self.SUMS

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        errors = (weights * (labels - predictions).square()).sum(-1)
        found = {"error_sum": errors, "weighted_num_samples": weights.sum(-1)}
        if self._include_r_squared:
            found["label_sum"] = (weights * labels).sum(-1)
            found["label_squared_sum"] = (weights * labels.square()).sum(-1)
        return found

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        mean = compute_calibration(sums["error_sum"], sums["weighted_num_samples"])
        found = {MetricName.MSE: mean, MetricName.RMSE: mean.sqrt()}
        if self._include_r_squared:
            spread = sums["label_squared_sum"] - sums["label_sum"].square() / sums["weighted_num_samples"]
            explained = 1.0 - sums["error_sum"] / spread
            found[MetricName.R_SQUARED] = torch.where(spread == 0.0, torch.ones_like(spread), explained)
        return found


class MSEMetric(RecMetric):
    """Compute the weighted mean squared error and its root, and how much of the variance is explained."""

    _namespace = MetricNamespace.MSE
    _computation_class = MSEMetricComputation
