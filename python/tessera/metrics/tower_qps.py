"""Samples per second of each task."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera import comm
from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from tessera.metrics.rec_metric import MetricComputationReport, RecMetric, RecMetricException, Values

__all__ = ["TowerQPSMetric", "TowerQPSMetricComputation"]

WARMUP_STEPS = 100


class TowerQPSMetricComputation(SummedComputation):
    """Count samples, and the seconds between the batches that come after `warmup_steps`."""

    SUMS: ClassVar = ("num_examples", "warmup_examples", "time_lapse")

    def __init__(self, *args: Any, warmup_steps: int = WARMUP_STEPS) -> None:
        super().__init__(*args)
        self._warmup_steps = warmup_steps
        self._steps = 0
        self._previous = 0.0

    def _add(self, predictions, labels, weights, inputs) -> None:
        self._steps += 1
        if self._steps > self._warmup_steps:
            super()._add(predictions, labels, weights, inputs)
            return
        self.num_examples += labels.numel()
        self.warmup_examples += labels.numel()
        self._previous = time.monotonic()

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        now = time.monotonic()
        lapse, self._previous = now - self._previous, now
        return {
            "num_examples": torch.tensor(labels.numel()),
            "warmup_examples": torch.tensor(0),
            "time_lapse": torch.tensor(lapse, dtype=torch.float64),
        }

    def _numbers(self, sums) -> dict[MetricName, torch.Tensor]:
        count, seconds = sums["num_examples"] - sums["warmup_examples"], sums["time_lapse"]
        return {MetricName.TOWER_QPS: torch.where(seconds <= 0.0, 0.0, count / seconds)}

    def _reports(self, totals: torch.Tensor, last: torch.Tensor) -> list[MetricComputationReport]:
        count = self._parts(totals)["num_examples"].long()
        report = MetricComputationReport(MetricName.TOTAL_EXAMPLES, MetricPrefix.DEFAULT, count)
        return [*super()._reports(totals, last), report]

    def _over_ranks(self, state: torch.Tensor) -> torch.Tensor:
        """Return the samples of all ranks and the seconds of the slowest. Collective."""
        # One message: seconds go to a place of each rank's own, and the longest are taken.
        seconds = state.new_zeros(self._group.size(), 2)
        seconds[self._group.rank()] = state[[2, 5]]
        together = comm.all_reduce(torch.cat([state, seconds.reshape(-1)]), self._group)
        counts = together[:6].clone()
        counts[[2, 5]] = together[6:].reshape(-1, 2).max(0).values
        return counts


class TowerQPSMetric(RecMetric):
    """Compute samples per second after `warmup_steps`: those of all ranks over the longest time of a rank.

    For tasks that have different numbers of samples in a batch.
    """

    _namespace = MetricNamespace.TOWER_QPS
    _computation_class = TowerQPSMetricComputation

    def __init__(
        self, *args: Any, fused_update_limit: int = 0, batch_size_stages: Any = None, **kwargs: Any
    ) -> None:
        if fused_update_limit > 0:
            raise RecMetricException("metrics.qps: updates cannot be fused; fused_update_limit has to be 0.")
        super().__init__(*args, **kwargs)

    def update(
        self, *, predictions: Values | None, labels: Values, weights: Values | None, **kwargs: Any
    ) -> None:
        """Count a batch by its labels."""
        super().update(predictions=labels, labels=labels, weights=None)
