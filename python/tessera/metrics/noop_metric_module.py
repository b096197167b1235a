"""No metrics at all, for trainings that ask for some."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tessera.metrics.deferrable_metrics import DeferrableMetrics
from tessera.metrics.metric_module import RecMetricModule

__all__ = ["NoOpMetricModule"]


class NoOpMetricModule(RecMetricModule):
    """Take batches and compute nothing.

    >>> module = NoOpMetricModule()
    >>> module.update({"prediction": torch.zeros(2)})
    >>> module.should_compute(), module.compute()
    (False, {})
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def update(self, model_out: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Do nothing."""

    def should_compute(self) -> bool:
        """Return False."""
        return False

    def compute(self) -> DeferrableMetrics:
        """Return nothing."""
        return DeferrableMetrics()

    def local_compute(self) -> DeferrableMetrics:
        """Return nothing."""
        return DeferrableMetrics()

    def sync(self) -> None:
        """Do nothing."""

    def unsync(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def get_required_inputs(self) -> None:
        """Return None."""
