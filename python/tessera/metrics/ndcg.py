"""Normalised discounted cumulative gain of sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_config import RecTaskInfo
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.rec_metric import RecMetric, RecMetricException

__all__ = ["NDCGComputation", "NDCGMetric"]


def _gain(labels: torch.Tensor, exponential: bool) -> torch.Tensor:
    return torch.exp2(labels) - 1.0 if exponential else labels


def _cumulative(labels: torch.Tensor, order: torch.Tensor, count: int, exponential: bool) -> torch.Tensor:
    first = _gain(labels[order[:count]], exponential)
    places = torch.arange(first.numel(), device=labels.device, dtype=torch.float64)
    return (first / torch.log2(places + 2.0)).sum()


class NDCGComputation(SummedComputation):
    """Add up what sessions miss of their best order, and sessions.

    A session weighs as much as the heaviest of its samples. Gains are labels, or 2^label - 1.
    """

    SUMS: ClassVar = ("sum_ndcg", "num_sessions")

    def __init__(
        self,
        *args: Any,
        exponential_gain: bool = False,
        session_key: str = "session_id",
        k: int = -1,
        report_ndcg_as_decreasing_curve: bool = True,
        remove_single_length_sessions: bool = False,
        scale_by_weights_tensor: bool = False,
        is_negative_task: bool = False,
    ) -> None:
        super().__init__(*args)
        self._exponential = exponential_gain
        self._key = session_key
        self._k = k
        self._decreasing = report_ndcg_as_decreasing_curve
        self._skip_single = remove_single_length_sessions
        self._scale = scale_by_weights_tensor
        self._is_negative = is_negative_task

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        raise RecMetricException(f"metrics.ndcg: samples come with {self._key!r}.")

    def _of_session(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = labels.numel() if self._k == -1 else min(self._k, labels.numel())
        best = _cumulative(labels, labels.argsort(descending=True), count, self._exponential)
        found = _cumulative(labels, scores.argsort(descending=True), count, self._exponential)
        share = found / torch.where(best == 0, 1e-6, best)
        return 1.0 - share if self._decreasing else share

    def _sums_with(self, predictions, labels, weights, inputs) -> Mapping[str, torch.Tensor]:
        if self._is_negative:
            predictions, labels = 1.0 - predictions, 1.0 - labels
        if self._scale:
            predictions, labels = predictions * weights, labels * weights
        total, count = torch.zeros((), dtype=torch.float64, device=labels.device), 0
        order = inputs[self._key].argsort(stable=True)
        sizes = inputs[self._key].unique(return_counts=True)[1].tolist()
        for places in order.split(sizes):
            if self._skip_single and places.numel() == 1:
                continue
            number = self._of_session(predictions[places], labels[places])
            total += number if self._scale else number * weights[places].max()
            count += 1
        return {"sum_ndcg": total, "num_sessions": torch.tensor(count)}

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        return {MetricName.NDCG: sums["sum_ndcg"] / sums["num_sessions"]}


class NDCGMetric(RecMetric):
    """Compute the mean over sessions of 1 - NDCG, so that less is better, or of NDCG if so asked."""

    _namespace = MetricNamespace.NDCG
    _computation_class = NDCGComputation

    def _get_task_kwargs(self, task_config: RecTaskInfo) -> dict[str, Any]:
        return {"is_negative_task": task_config.is_negative_task}

    def get_required_inputs(self) -> set[str]:
        """Return the name of the sessions' tensor."""
        return {self._options.get("session_key", "session_id")}
