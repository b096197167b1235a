"""The share of positive answers that are right."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["PrecisionMetric", "PrecisionMetricComputation"]


class RightPositives(SummedComputation, abc.ABC):
    """Divide the right positives by them and the wrong answers of one kind, the second of `SUMS`."""

    NAME: ClassVar[MetricName]

    def __init__(self, *args: Any, threshold: float = 0.5) -> None:
        super().__init__(*args)
        self._threshold = threshold

    @abc.abstractmethod
    def _is_wrong(self, says_so: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return what a sample counts as such an answer."""

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        says_so = predictions >= self._threshold
        right, wrong = says_so * labels, self._is_wrong(says_so, labels)
        return dict(zip(self.SUMS, ((weights * right).sum(-1), (weights * wrong).sum(-1)), strict=True))

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        right, wrong = (sums[name] for name in self.SUMS)
        return {self.NAME: compute_calibration(right, right + wrong)}


class PrecisionMetricComputation(RightPositives):
    """Add up right and wrong answers; a prediction of `threshold` or more says 1."""

    SUMS: ClassVar = ("true_pos_sum", "false_pos_sum")
    NAME = MetricName.PRECISION

    def _is_wrong(self, says_so: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return says_so * (1.0 - labels)


class PrecisionMetric(RecMetric):
    """Compute right positives over all that a threshold calls positive; 0 if there are none."""

    _namespace = MetricNamespace.PRECISION
    _computation_class = PrecisionMetricComputation
