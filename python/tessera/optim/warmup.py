"""Learning rates that change by schedule.

>>> import torch
>>> from tessera.optim.keyed import KeyedOptimizerWrapper
>>> weight = torch.nn.Parameter(torch.ones(1))
>>> inner = KeyedOptimizerWrapper({"weight": weight}, lambda params: torch.optim.SGD(params, lr=1.0))
>>> optimizer = WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.5)], lr=1.0)
>>> rates = []
>>> for _ in range(3):
...     rates.append(optimizer.param_groups[0]["lr"])
...     optimizer.step()
>>> rates
[0.5, 0.75, 1.0]
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

import torch

from tessera.optim.keyed import KeyedOptimizer, OptimizerWrapper

__all__ = ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]


@unique
class WarmupPolicy(Enum):
    """Say how a stage multiplies the learning rate, i being the number of the step."""

    NONE = "none"  # 1
    LINEAR = "linear"  # from `value` to 1 in max_iters steps
    CONSTANT = "constant"  # `value`
    POLY = "poly"  # (1 - i / decay_iters) to the power of `value`
    STEP = "step"  # `value` to the power of floor(i / decay_iters)
    INVSQRT = "inv_sqrt"  # 1 / sqrt(i)
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"  # from 1 to `value`, every sgdr_period
    INTERPOLATE = "interpolate"  # from `value` at start_interpolating_iters to `end_value` at max_iters


@dataclass
class WarmupStage:
    """Hold until step `max_iters`, counted from the beginning of training; `lr_scale` multiplies everything.

    `decay_iters` is `max_iters` if left out, 1 for STEP.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None


def _multiplier(stage: WarmupStage, step: int) -> float:
    if stage.policy == WarmupPolicy.LINEAR:
        factor = stage.value + (1.0 - stage.value) * step / stage.max_iters
    elif stage.policy == WarmupPolicy.CONSTANT:
        factor = stage.value
    elif stage.policy == WarmupPolicy.POLY:
        factor = math.pow(1 - step / stage.decay_iters, stage.value)
    elif stage.policy == WarmupPolicy.STEP:
        factor = math.pow(stage.value, step // stage.decay_iters)
    elif stage.policy == WarmupPolicy.INVSQRT:
        factor = 1.0 / math.sqrt(step)
    elif stage.policy == WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
        phase = math.pi * (step % stage.sgdr_period) / stage.sgdr_period
        factor = stage.value + (1.0 - stage.value) * (1.0 + math.cos(phase)) / 2
    elif stage.policy == WarmupPolicy.INTERPOLATE:
        begin = stage.start_interpolating_iters
        share = (step - begin) / (stage.max_iters - begin)
        factor = stage.value + (stage.end_value - stage.value) * share
    else:
        factor = 1.0
    return factor * stage.lr_scale


def _check(stages: list[WarmupStage]) -> None:
    last = 0
    for place, stage in enumerate(stages):
        if stage.max_iters <= last:
            raise ValueError(
                f"optim.warmup: stage {place} ends at step {stage.max_iters}, but begins after step {last}."
            )
        interpolates = stage.policy == WarmupPolicy.INTERPOLATE
        if interpolates and (stage.start_interpolating_iters is None or stage.end_value is None):
            raise ValueError(
                f"optim.warmup: stage {place} interpolates; give start_interpolating_iters and end_value."
            )
        last = stage.max_iters


def _completed(stages: list[WarmupStage]) -> list[WarmupStage]:
    """Return the stages with `decay_iters` filled in, and one without a policy behind the last."""
    _check(stages)
    found = []
    for stage in stages:
        default = 1 if stage.policy == WarmupPolicy.STEP else stage.max_iters
        found.append(
            dataclasses.replace(stage, decay_iters=default if stage.decay_iters <= 0 else stage.decay_iters)
        )
    return [*found, WarmupStage(policy=WarmupPolicy.NONE, max_iters=sys.maxsize)]


class WarmupOptimizer(OptimizerWrapper):
    """Set the learning rate of the optimizer inside before each step, stage after stage.

    `lr` is the rate that the stages multiply; `lr_param` its name in the groups. Step and stage are state
    of a parameter that does not exist otherwise, `param_name`.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: list[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        self._stages = _completed(stages)
        self._lr_param = lr_param
        self._lr = lr
        self._warmup_param = torch.nn.Parameter(torch.zeros(1))
        self._param_name = param_name
        if param_name in optimizer.params:
            raise ValueError(f"optim.warmup: the optimizer has a parameter {param_name!r} already.")
        self._place = torch.zeros(2, dtype=torch.int64)  # step and stage
        self._set_rate(0, 0)

    def _set_rate(self, step: int, stage: int) -> None:
        rate = self._lr * _multiplier(self._stages[stage], step)
        for group in self.param_groups:
            group[self._lr_param] = rate

    @property
    def params(self) -> dict[str, Any]:
        """Return the parameters by name, with the one that holds step and stage."""
        return {**self._optimizer.params, self._param_name: self._warmup_param}

    @property
    def state(self) -> dict[Any, Any]:
        """Return the state by parameter, with step and stage once there are any."""
        own = {self._warmup_param: {"warmup": self._place}} if int(self._place[0]) else {}
        return {**self._optimizer.state, **own}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside, with step and stage."""
        return KeyedOptimizer.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy; step and stage need not be there, and count from the beginning then."""
        inside = dict(state_dict)
        states = dict(inside["state"])
        place = states.pop(self._param_name, {"warmup": torch.zeros(2, dtype=torch.int64)})
        inside["state"] = states
        self._optimizer.load_state_dict(inside)
        self._place.copy_(place["warmup"])
        self.post_load_state_dict()

    def post_load_state_dict(self) -> None:
        """Set the rate of the step that was loaded."""
        self._set_rate(int(self._place[0]), int(self._place[1]))

    def step(self, closure: Any = None) -> Any:
        """Step, then set the rate of the next step."""
        result = super().step(closure)
        step, stage = int(self._place[0]) + 1, int(self._place[1])
        if step > self._stages[stage].max_iters and stage + 1 < len(self._stages):
            stage += 1
        self._set_rate(step, stage)
        self._place[0], self._place[1] = step, stage
        return result
