"""Several batches per step of the optimizer, for any pipeline.

    >>> wrapped = GradientAccumulationWrapper(  # doctest: +SKIP
    ...     pipeline, optimizer, model, GradientAccumulationConfig(num_steps=4)
    ... )
    >>> wrapped.progress(batches)  # doctest: +SKIP

The gradients of `num_steps` batches add up; the last of them averages them over the ranks and steps the
optimizer. Tables that step in backward step at every batch. At the end of the batches, what has added up is
averaged and stepped, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from tessera.distributed.model_parallel import get_unwrapped_module

__all__ = ["GradientAccumulationConfig", "GradientAccumulationWrapper"]

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass
class GradientAccumulationConfig:
    """Say how many batches a step has; more than one switches accumulation on.

    The first `num_warmup_steps` batches average their gradients each for itself.

    >>> GradientAccumulationConfig(num_steps=2).is_enabled
    True
    """

    is_enabled: bool = False
    num_steps: int = 1
    num_warmup_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_warmup_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        self.is_enabled = self.is_enabled or self.num_steps > 1


class _SteppedNowAndThen:
    """Step an optimizer at every `num_steps`-th call, and clear gradients only after that."""

    def __init__(self, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        self.optimizer = optimizer
        self.num_steps = num_steps
        self.count = 0
        self.has_stepped = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.has_stepped:
            self.optimizer.zero_grad(set_to_none=set_to_none)
            self.has_stepped = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        if (self.count + 1) % self.num_steps == 0:
            self.step_now(*args, **kwargs)

    def step_now(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer.step(*args, **kwargs)
        self.has_stepped = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class GradientAccumulationWrapper(Generic[In, Out]):
    """Let a pipeline step its optimizer once for several batches. All ranks wrap alike."""

    def __init__(
        self,
        pipeline: Any,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        config: GradientAccumulationConfig,
    ) -> None:
        self._pipeline = pipeline
        self._config = config
        self._optimizer = _SteppedNowAndThen(optimizer, config.num_steps)
        found = [model, *get_unwrapped_module(model).modules()]
        self._averaging = [module for module in found if hasattr(module, "no_sync")]
        if config.is_enabled:
            pipeline._optimizer = self._optimizer

    @property
    def optimizer_wrapper(self) -> Any:
        """Return what the pipeline calls as its optimizer."""
        return self._optimizer

    @property
    def current_step(self) -> int:
        """Return how many batches were trained on."""
        return self._optimizer.count

    def set_step(self, step: int) -> None:
        """Go on as after `step` batches, as a resumed training does."""
        self._optimizer.count = step

    def _averages(self, is_last: bool) -> bool:
        count = self.current_step
        return is_last or count < self._config.num_warmup_steps or (count + 1) % self._config.num_steps == 0

    @contextlib.contextmanager
    def _not_averaging(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in self._averaging:
                stack.enter_context(module.no_sync())
            yield

    def progress(self, dataloader_iter: Iterator[In], is_last_batch: bool | None = None) -> Out:
        """Train on one batch; after the last one average and step whatever has added up. Collective.

        `is_last_batch` asks for that at a batch that others may follow.
        """
        if not self._config.is_enabled:
            return self._pipeline.progress(dataloader_iter)
        is_last = bool(is_last_batch) or not self._pipeline.has_another_after(dataloader_iter)
        with contextlib.nullcontext() if self._averages(is_last) else self._not_averaging():
            output = self._pipeline.progress(dataloader_iter)
        self._optimizer.count += 1
        if is_last and not self._optimizer.has_stepped:
            self._optimizer.step_now()
        return output

    def reset(self) -> None:
        """Drop the batches in flight and begin to count anew."""
        self._optimizer.count = 0
        self._optimizer.has_stepped = True
        self._pipeline.reset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)
