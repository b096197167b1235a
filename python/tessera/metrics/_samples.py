"""What the metrics that keep samples share: the last ones of all ranks, whole or by groups."""

from __future__ import annotations

import abc
from collections import deque
from typing import Any, ClassVar

import torch
from torch import nn

from tessera import comm
from tessera.metrics._summed import Synced
from tessera.metrics.metrics_namespace import MetricNameBase, MetricPrefix
from tessera.metrics.rec_metric import MetricComputationReport, RecMetric

__all__ = ["GROUPING_KEYS", "SampledComputation", "SampledMetric"]

GROUPING_KEYS = "grouping_keys"


class SampledComputation(Synced, nn.Module):
    """Keep the last samples of one task: predictions, labels, weights and, if `grouped`, their groups."""

    NAME: ClassVar[MetricNameBase]
    GROUPED_NAME: ClassVar[MetricNameBase]

    def __init__(
        self, my_rank: int, window_size: int, compute_on_all_ranks: bool, group, *, grouped: bool = False
    ) -> None:
        super().__init__()
        self._my_rank = my_rank
        self._on_all_ranks = compute_on_all_ranks
        self._group = group
        self._size = window_size
        self._grouped = grouped
        self._count = 0
        self._batches: deque[torch.Tensor] = deque()

    @abc.abstractmethod
    def _number(self, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the metric of samples."""

    def _add(self, predictions, labels, weights, inputs) -> None:
        parts = [predictions, labels, weights, *([inputs[GROUPING_KEYS]] if self._grouped else [])]
        batch = torch.stack([part.detach().double() for part in parts])
        self._batches.append(batch)
        self._count += batch.size(1)
        while self._count - self._batches[0].size(1) >= self._size:
            self._count -= self._batches.popleft().size(1)

    def _samples(self) -> torch.Tensor:
        if not self._batches:
            return torch.zeros(4 if self._grouped else 3, 0, dtype=torch.float64)
        samples = torch.cat(list(self._batches), dim=1)
        return samples if self._is_synced else samples[:, -self._size :]

    def _mean_of_groups(self, samples: torch.Tensor) -> torch.Tensor:
        keys = samples[3]
        parts = [samples[:3, keys == key] for key in keys.unique()]
        return torch.stack([self._number(*part).double() for part in parts]).mean()

    def _report(self, samples: torch.Tensor) -> list[MetricComputationReport]:
        def told(name: MetricNameBase, number: torch.Tensor) -> MetricComputationReport:
            return MetricComputationReport(name, MetricPrefix.WINDOW, number.float().reshape(1))

        if not samples.size(1):
            half = torch.tensor(0.5)
            return [told(name, half) for name in (self.NAME, *([self.GROUPED_NAME] if self._grouped else []))]
        found = [told(self.NAME, self._number(*samples[:3]))]
        if self._grouped:
            found.append(told(self.GROUPED_NAME, self._mean_of_groups(samples)))
        return found

    def local_compute(self) -> list[MetricComputationReport]:
        """Return the metric of this rank's samples."""
        return self._report(self._samples())

    def _state_tensor(self) -> torch.Tensor:
        return self._samples()

    def _over_ranks(self, state: torch.Tensor) -> torch.Tensor:
        return comm.all_gather_v(state.T.contiguous(), self._group).T

    def _put(self, state: torch.Tensor) -> None:
        self._batches = deque([state])
        self._count = state.size(1)

    def compute(self) -> list[MetricComputationReport]:
        """Return the metric of all ranks' samples: on rank 0, or on all if asked for. Collective."""
        samples = self._of_all()
        if self._my_rank != 0 and not self._on_all_ranks:
            return []
        return self._report(samples)

    def reset(self) -> None:
        """Forget everything."""
        self._batches.clear()
        self._own = None
        self._count = 0


class SampledMetric(RecMetric):
    """Compute a metric of the last samples, and with `grouped_...` its mean over groups of them."""

    GROUPED: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_grouped = bool(kwargs.pop(self.GROUPED, False))
        super().__init__(*args, **kwargs)

    def _get_task_kwargs(self, task_config: Any) -> dict[str, Any]:
        return {"grouped": self._is_grouped}

    def get_required_inputs(self) -> set[str]:
        """Return the name of the groups' tensor, if there are groups."""
        return {GROUPING_KEYS} if self._is_grouped else set()
