"""The share of positive samples that are among the first of their session."""

from __future__ import annotations

from typing import ClassVar

import torch

from tessera.metrics._sessions import SessionComputation, SessionMetric, ranking_within_session
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace

__all__ = ["RecallSessionMetric", "RecallSessionMetricComputation", "ranking_within_session"]


class RecallSessionMetricComputation(SessionComputation):
    """Add up right and wrong answers."""

    SUMS: ClassVar = ("num_true_pos", "num_false_neg")
    NAME: ClassVar = MetricName.RECALL_SESSION_LEVEL

    def _wrong(self, labels: torch.Tensor, says_so: torch.Tensor) -> torch.Tensor:
        return labels * (1.0 - says_so)


class RecallSessionMetric(SessionMetric):
    """Compute right answers over all positive samples; NaN if there are none."""

    _namespace = MetricNamespace.RECALL_SESSION_LEVEL
    _computation_class = RecallSessionMetricComputation
