"""Samples per second."""

from __future__ import annotations

import copy
import time
from collections import deque
from typing import Any

import torch
from torch import nn

from tessera.metrics.metrics_config import BatchSizeStage, validate_batch_size_stages
from tessera.metrics.metrics_namespace import (
    MetricName,
    MetricNamespace,
    MetricPrefix,
    compose_metric_key,
)

__all__ = ["ThroughputMetric"]


class ThroughputMetric(nn.Module):
    """Count the samples of all ranks, and how many come in a second after `warmup_steps`.

    The window is of `window_seconds`; the attempt is since this object was made, the lifetime goes on when a
    state is loaded. With `batch_size_stages` a step has as many samples as its stage says.

    >>> metric = ThroughputMetric(batch_size=4, world_size=2, window_seconds=10, warmup_steps=1)
    >>> metric.update()
    >>> int(metric.compute()["throughput-throughput|total_examples"])
    8
    """

    def __init__(
        self,
        *,
        batch_size: int,
        world_size: int,
        window_seconds: int,
        warmup_steps: int = 100,
        batch_size_stages: list[BatchSizeStage] | None = None,
    ) -> None:
        super().__init__()
        validate_batch_size_stages(batch_size_stages)
        for name, value in (
            ("batch_size", batch_size),
            ("world_size", world_size),
            ("window_seconds", window_seconds),
        ):
            if value < 1:
                raise ValueError(f"metrics.throughput: {name} is {value}; it has to be 1 or more.")
        self._batch_size = batch_size
        self._world_size = world_size
        self._stages = copy.deepcopy(batch_size_stages)
        self._num_batch = 0  # the steps that were done, by which the stage is found
        self._seconds = window_seconds
        self._warmup_steps = max(1, warmup_steps)
        self._steps = 0
        self._previous = 0.0
        self._window: deque[float] = deque()
        self._window_lapse = 0.0
        self._attempt = [0, 0, 0.0]  # all samples, those of the warmup, seconds after it
        self.register_buffer("total_examples", torch.tensor(0))
        self.register_buffer("warmup_examples", torch.tensor(0))
        self.register_buffer("time_lapse_after_warmup", torch.tensor(0.0, dtype=torch.float64))

    def set_num_batch(self, num_batch: int) -> None:
        """Say how many steps were done already, where there are stages."""
        self._num_batch = num_batch

    def _size_now(self) -> int:
        """Return the batch size of the step that was counted last."""
        for stage in self._stages or ():
            if stage.max_iters is None or self._num_batch <= stage.max_iters:
                return stage.batch_size
        return self._batch_size

    def update(self) -> None:
        """Count a step."""
        now = time.monotonic()
        self._steps += 1
        self._num_batch += 1
        examples = self._size_now() * self._world_size
        self.total_examples += examples
        self._attempt[0] += examples
        if self._steps <= self._warmup_steps:
            self.warmup_examples += examples
            self._attempt[1] += examples
        else:
            lapse = now - self._previous
            self.time_lapse_after_warmup += lapse
            self._attempt[2] += lapse
            self._window.append(lapse)
            self._window_lapse += lapse
            while self._window_lapse > self._seconds and len(self._window) > 1:
                self._window_lapse -= self._window.popleft()
        self._previous = now

    def _key(self, name: MetricName, prefix: MetricPrefix = MetricPrefix.DEFAULT) -> str:
        return compose_metric_key(MetricNamespace.THROUGHPUT, str(MetricNamespace.THROUGHPUT), name, prefix)

    def compute(self) -> dict[str, torch.Tensor]:
        """Return the counts, and the rates once the warmup is over."""
        total, warm, lapse = self._attempt
        found = {
            self._key(MetricName.TOTAL_EXAMPLES): self.total_examples.clone(),
            self._key(MetricName.ATTEMPT_EXAMPLES): torch.tensor(total),
        }
        if self._steps > self._warmup_steps:
            rates = {
                MetricPrefix.LIFETIME: (self.total_examples - self.warmup_examples)
                / self.time_lapse_after_warmup,
                MetricPrefix.WINDOW: torch.tensor(
                    len(self._window) * self._size_now() * self._world_size / max(self._window_lapse, 1e-12),
                    dtype=torch.float64,
                ),
                MetricPrefix.ATTEMPT: torch.tensor((total - warm) / max(lapse, 1e-12), dtype=torch.float64),
            }
            found |= {self._key(MetricName.THROUGHPUT, prefix): rate for prefix, rate in rates.items()}
        if self._stages is not None:
            found[self._key(MetricName.BATCH_SIZE)] = torch.tensor(self._size_now(), dtype=torch.int32)
        return found

    # The number of steps is state where there are stages; a state with it loads where there are none, too.
    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._stages is not None:
            destination[f"{prefix}num_batch"] = torch.tensor(self._num_batch)

    def _load_from_state_dict(self, state_dict, prefix, *args: Any) -> None:
        count = state_dict.pop(f"{prefix}num_batch", None)
        if count is not None and self._stages is not None:
            self._num_batch = int(count)
        super()._load_from_state_dict(state_dict, prefix, *args)
