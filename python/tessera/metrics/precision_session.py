"""The share of a session's first that are positive."""

from __future__ import annotations

from typing import ClassVar

import torch

from tessera.metrics._sessions import SessionComputation, SessionMetric
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace

__all__ = ["PrecisionSessionMetric", "PrecisionSessionMetricComputation"]


class PrecisionSessionMetricComputation(SessionComputation):
    """Add up right and wrong answers."""

    SUMS: ClassVar = ("num_true_pos", "num_false_pos")
    NAME: ClassVar = MetricName.PRECISION_SESSION_LEVEL

    def _wrong(self, labels: torch.Tensor, says_so: torch.Tensor) -> torch.Tensor:
        return (1.0 - labels) * says_so


class PrecisionSessionMetric(SessionMetric):
    """Compute right answers over all answers; NaN if there are none."""

    _namespace = MetricNamespace.PRECISION_SESSION_LEVEL
    _computation_class = PrecisionSessionMetricComputation
