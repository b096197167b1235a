"""Metrics of the last batch alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from tessera.metrics.rec_metric import RecMetricComputation

__all__ = ["LatestBatch"]


class LatestBatch(RecMetricComputation):
    """Keep what the last batch brought where others keep sums; the window adds up as usual. No state."""

    PERSISTENT: ClassVar = False

    def update(
        self,
        predictions: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Forget the last batch, and keep this one."""
        for name in self.sums():
            getattr(self, name).zero_()
        super().update(predictions, labels, weights, inputs)
