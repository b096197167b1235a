"""Metrics of the last batch alone."""

from __future__ import annotations

from typing import ClassVar

from tessera.metrics._summed import SummedComputation

__all__ = ["LatestBatch"]


class LatestBatch(SummedComputation):
    """Keep what the last batch brought where others keep sums; the window adds up as usual. No state."""

    PERSISTENT: ClassVar = False

    def _add(self, predictions, labels, weights, inputs) -> None:
        for name in self.sums():
            getattr(self, name).zero_()
        super()._add(predictions, labels, weights, inputs)
