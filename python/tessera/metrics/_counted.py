"""The number of samples that metrics of a served model are of."""

from __future__ import annotations

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricPrefix
from tessera.metrics.rec_metric import MetricComputationReport

__all__ = ["CountedSamples"]


class CountedSamples(SummedComputation):
    """Count samples beside the sums of the class that comes after this one."""

    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums."""
        return (*super().sums(), "num_examples")

    def _sums_with(self, predictions, labels, weights, inputs):
        added = super()._sums_with(predictions, labels, weights, inputs)
        return {**added, "num_examples": torch.tensor(labels.numel())}

    def _numbers(self, sums):
        return super()._numbers({name: sums[name] for name in super().sums()})

    def _reports(self, totals: torch.Tensor, last: torch.Tensor) -> list[MetricComputationReport]:
        count = self._parts(totals)["num_examples"].long()
        report = MetricComputationReport(MetricName.TOTAL_EXAMPLES, MetricPrefix.DEFAULT, count)
        return [*super()._reports(totals, last), report]
