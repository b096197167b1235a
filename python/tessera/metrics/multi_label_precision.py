"""Precision of several yes-or-no labels that are the bits of one number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.calibration import compute_calibration
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric, RecMetricException

__all__ = ["MultiLabelPrecisionMetric", "MultiLabelPrecisionMetricComputation"]


class MultiLabelPrecisionMetricComputation(SummedComputation):
    """Add up right and wrong answers of each label; bit i of predictions and labels is label i."""

    def __init__(self, *args: Any, num_labels: int = 1, label_names: list[str] | None = None) -> None:
        self._names = label_names or [f"label_{place}" for place in range(num_labels)]
        if len(self._names) != num_labels:
            raise RecMetricException(
                f"metrics.multi_label_precision: {len(self._names)} names for {num_labels} labels."
            )
        super().__init__(*args)

    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums."""
        return tuple(f"{kind}_pos_sum_{name}" for name in self._names for kind in ("true", "false"))

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        added = {}
        for place, name in enumerate(self._names):
            says_so, is_so = ((bits.long() >> place) & 1 for bits in (predictions, labels))
            added[f"true_pos_sum_{name}"] = (weights * says_so * is_so).sum(-1)
            added[f"false_pos_sum_{name}"] = (weights * says_so * (1 - is_so)).sum(-1)
        return added

    def _numbers(self, sums) -> dict[tuple[MetricName, str], torch.Tensor]:
        found = {}
        for name in self._names:
            right, wrong = sums[f"true_pos_sum_{name}"], sums[f"false_pos_sum_{name}"]
            found[MetricName.MULTI_LABEL_PRECISION, name] = compute_calibration(right, right + wrong)
        return found


class MultiLabelPrecisionMetric(RecMetric):
    """Compute the precision of each label; 0 where nothing was called positive."""

    _namespace = MetricNamespace.MULTI_LABEL_PRECISION
    _computation_class = MultiLabelPrecisionMetricComputation
