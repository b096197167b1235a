"""Precision and recall at the first threshold that would have been precise enough."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["HindsightTargetPRMetric", "HindsightTargetPRMetricComputation"]

THRESHOLD_GRANULARITY = 1000


class HindsightTargetPRMetricComputation(SummedComputation):
    """Add up right and wrong answers at 1000 thresholds between 0 and 1."""

    SUMS: ClassVar = ("true_pos_sum", "false_pos_sum", "false_neg_sum")

    def __init__(self, *args: Any, target_precision: float = 0.5) -> None:
        super().__init__(*args, shapes=dict.fromkeys(self.SUMS, (THRESHOLD_GRANULARITY,)))
        self._target_precision = target_precision

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        thresholds = torch.linspace(0, 1, THRESHOLD_GRANULARITY, device=predictions.device)[:, None]
        above, below = predictions >= thresholds.double(), predictions <= thresholds.double()
        return {
            "true_pos_sum": (above * labels * weights).sum(-1),
            "false_pos_sum": (above * (1.0 - labels) * weights).sum(-1),
            "false_neg_sum": (below * labels * weights).sum(-1),
        }

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        right, wrong, missed = (sums[name] for name in self.SUMS)
        precision = compute_calibration(right, right + wrong)
        reached = (precision >= self._target_precision).nonzero()
        place = int(reached[0]) if len(reached) else THRESHOLD_GRANULARITY - 1
        return {
            MetricName.HINDSIGHT_TARGET_PR: torch.tensor([place], dtype=torch.float64),
            MetricName.HINDSIGHT_TARGET_PRECISION: precision[place],
            MetricName.HINDSIGHT_TARGET_RECALL: compute_calibration(right, right + missed)[place],
        }


class HindsightTargetPRMetric(RecMetric):
    """Find the lowest of 1000 thresholds whose precision is `target_precision`; the last one if none is.

    Its place is `hindsight_target_pr`, beside precision and recall there.
    """

    _namespace = MetricNamespace.HINDSIGHT_TARGET_PR
    _computation_class = HindsightTargetPRMetricComputation
