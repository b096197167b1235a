"""Computations of metrics of one's own, as torchrec's are written: named states, updated batch by batch.

>>> from tessera.metrics.metrics_namespace import MetricName, MetricPrefix
>>> class Largest(RecMetricComputation):
...     def __init__(self, *args, **kwargs):
...         super().__init__(*args, **kwargs)
...         self._add_state("top", torch.zeros(self._n_tasks), False, dist_reduce_fx="max", persistent=True)
...
...     def update(self, *, predictions, labels, weights, **kwargs):
...         self.top = torch.maximum(self.top, predictions.max(-1).values)
...
...     def _compute(self):
...         return [MetricComputationReport(MetricName.DEFAULT, MetricPrefix.LIFETIME, self.top)]
>>> largest = Largest(my_rank=0, batch_size=2, n_tasks=1, window_size=10)
>>> largest.update(predictions=torch.tensor([[0.2, 0.7]]), labels=None, weights=None)
>>> largest.compute()[0].value
tensor([0.7000])
"""

from __future__ import annotations

import abc
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera import comm
from tessera.metrics.metrics_config import RecComputeMode
from tessera.metrics.metrics_namespace import MetricNameBase, MetricPrefix

__all__ = [
    "MAX_BUFFER_COUNT",
    "MetricComputationReport",
    "RecMetricComputation",
    "RecMetricException",
    "Window",
    "WindowBuffer",
    "has_others",
]

MAX_BUFFER_COUNT = 1000  # batches that a window holds, however small they are

State = torch.Tensor | list[torch.Tensor]


class RecMetricException(Exception):
    """Say that a metric was given what it cannot use."""


@dataclass
class MetricComputationReport:
    """Hold one number of one task."""

    name: MetricNameBase
    metric_prefix: MetricPrefix
    value: torch.Tensor
    description: str | None = None


class Window:
    """Keep what the last `size` samples of this rank brought, batch by batch, in at most so many batches."""

    def __init__(self, size: int, max_batches: int = MAX_BUFFER_COUNT) -> None:
        self._size = size
        self._max_batches = max_batches
        self._count = 0
        self.batches: deque[tuple[int, Any]] = deque()

    def add(self, count: int, batch: Any) -> list[Any]:
        """Add a batch; return those that have left."""
        self.batches.append((count, batch))
        self._count += count
        gone = []
        while self._count > self._size or len(self.batches) > self._max_batches:
            number, old = self.batches.popleft()
            self._count -= number
            gone.append(old)
        return gone

    def clear(self) -> None:
        """Forget everything."""
        self.batches.clear()
        self._count = 0


class WindowBuffer:
    """Keep in a window's state what its last samples brought, in at most so many batches."""

    def __init__(self, max_size: int, max_buffer_count: int) -> None:
        self._window = Window(max_size, max_buffer_count)

    def aggregate_state(self, window_state: torch.Tensor, curr_state: torch.Tensor, size: int) -> None:
        """Add a batch of `size` samples to the state, and take off those that leave the window."""
        batch = curr_state.detach().clone()
        window_state += batch
        for old in self._window.add(size, batch):
            window_state -= old

    @property
    def buffers(self) -> deque[torch.Tensor]:
        """Return what each batch brought."""
        return deque(batch for _, batch in self._window.batches)


def has_others(group: dist.ProcessGroup | None) -> bool:
    """Tell whether there are other ranks to add up with."""
    return group is not None and group.size() > 1


def _cat(states: State) -> State:
    if isinstance(states, torch.Tensor):
        return states
    return torch.cat([state.reshape(1) if state.dim() == 0 else state for state in states])


def _any(states: torch.Tensor) -> torch.Tensor:
    return states.any(0).byte()


_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda states: states.sum(0),
    "mean": lambda states: states.mean(0),
    "max": lambda states: states.amax(0),
    "min": lambda states: states.amin(0),
    "cat": _cat,
}


def _of_all_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method see the states of all ranks' samples."""

    @functools.wraps(method)
    def wrapper(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_synced or not has_others(self._group()):
            return method(self, *args, **kwargs)
        self.sync()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.unsync()

    return wrapper


def _of_this_rank(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method change the states, without gradients."""

    @functools.wraps(method)
    def wrapper(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_synced:
            raise RecMetricException(
                "metrics: a batch came between sync and unsync and would be lost. Call unsync first."
            )
        with torch.no_grad():
            return method(self, *args, **kwargs)

    return wrapper


class RecMetricComputation(nn.Module, abc.ABC):
    """Compute the numbers of one task, or of `n_tasks`, from states that batches change.

    A class of one's own calls `_add_state` when it is made, changes the states in `update` and returns
    reports from `_compute`, which sees the states of all ranks where `compute` was called and those of this
    rank where `local_compute` was. `RecMetric` makes it for every task, and once for all tasks if these are
    computed fused. Tessera's own metrics do not derive from it: they add up in double precision.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, wrap in (("compute", _of_all_ranks), ("update", _of_this_rank)):
            if name in vars(cls):
                setattr(cls, name, wrap(vars(cls)[name]))

    def __init__(
        self,
        my_rank: int,
        batch_size: int,
        n_tasks: int,
        window_size: int,
        compute_on_all_ranks: bool = False,
        should_validate_update: bool = False,
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        process_group: dist.ProcessGroup | None = None,
        fused_update_limit: int = 0,
        allow_missing_label_with_zero_weight: bool = False,
        enable_pt2_compile: bool = False,
    ) -> None:
        super().__init__()
        self._my_rank = my_rank
        self._batch_size = batch_size
        self._n_tasks = n_tasks
        self._window_size = window_size
        self._compute_on_all_ranks = compute_on_all_ranks
        self._should_validate_update = should_validate_update
        self._compute_mode = compute_mode
        self.process_group = process_group
        self._batch_window_buffers: dict[str, WindowBuffer] | None = {} if window_size > 0 else None
        self._defaults: dict[str, State] = {}
        self._reductions: dict[str, Callable[[Any], Any] | None] = {}
        self._saved_lists: set[str] = set()
        self._own: dict[str, State] | None = None  # this rank's states, while those of all stand there
        if should_validate_update:
            seen = torch.zeros(n_tasks, dtype=torch.uint8)
            self._add_state("has_valid_update", seen, False, dist_reduce_fx=_any, persistent=True)

    def _group(self) -> dist.ProcessGroup | None:
        if self.process_group is None and dist.is_initialized():
            return dist.group.WORLD
        return self.process_group

    def add_state(
        self,
        name: str,
        default: State,
        dist_reduce_fx: str | Callable[[Any], Any] | None = None,
        persistent: bool = False,
    ) -> None:
        """Add a tensor, or an empty list for tensors, found as an attribute from now on.

        `dist_reduce_fx` makes one of all ranks' states: "sum", "mean", "max" and "min" of tensors, "cat" of
        lists; or a function of the stacked tensors, or of the list of all. Without it that is the state.
        """
        if isinstance(dist_reduce_fx, str) and dist_reduce_fx not in _REDUCTIONS:
            raise ValueError(
                f"metrics: there is no dist_reduce_fx {dist_reduce_fx!r}. Name one of "
                f"{', '.join(_REDUCTIONS)}, or give a function."
            )
        if isinstance(default, torch.Tensor):
            default = default.detach().contiguous()
            self.register_buffer(name, default.clone(), persistent=persistent)
        elif default:
            raise ValueError(f"metrics: state {name!r} begins with a list that is not empty.")
        else:
            setattr(self, name, [])
            self._saved_lists |= {name} if persistent else set()
        self._defaults[name] = default
        named = isinstance(dist_reduce_fx, str)
        self._reductions[name] = _REDUCTIONS[dist_reduce_fx] if named else dist_reduce_fx

    def _add_state(self, name: str, default: State, add_window_state: bool, **kwargs: Any) -> None:
        """Add a state, and one of the last samples beside it, which is not saved."""
        self.add_state(name, default, **kwargs)
        if not add_window_state:
            return
        self.add_state(self.get_window_state_name(name), default, **{**kwargs, "persistent": False})
        self._buffers_of_windows()[self.get_window_state_name(name)] = self._new_buffer()

    def _buffers_of_windows(self) -> dict[str, WindowBuffer]:
        if self._batch_window_buffers is None:
            raise RuntimeError("metrics: window_size is 0, so that there are no states of windows.")
        return self._batch_window_buffers

    def _new_buffer(self) -> WindowBuffer:
        return WindowBuffer(self._window_size, MAX_BUFFER_COUNT)

    @staticmethod
    def get_window_state_name(state_name: str) -> str:
        """Return the name of the state of the last samples beside a state."""
        return f"window_{state_name}"

    def get_window_state(self, state_name: str) -> torch.Tensor:
        """Return the state of the last samples beside a state."""
        return getattr(self, self.get_window_state_name(state_name))

    def _aggregate_window_state(self, state_name: str, state: torch.Tensor, num_samples: int) -> None:
        """Add what a batch brings to the state of the last samples."""
        name = self.get_window_state_name(state_name)
        self._buffers_of_windows()[name].aggregate_state(getattr(self, name), state, num_samples)

    @abc.abstractmethod
    def update(
        self,
        *,
        predictions: torch.Tensor | None,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
        **kwargs: Any,
    ) -> None:
        """Take a batch: tensors of [tasks, samples]."""

    @abc.abstractmethod
    def _compute(self) -> list[MetricComputationReport]:
        """Return the numbers of the states."""

    def pre_compute(self) -> None:
        """Do what has to be done with this rank's states before numbers are asked for."""

    @_of_all_ranks
    def compute(self) -> list[MetricComputationReport]:
        """Return the numbers of all ranks' samples: on rank 0, or on all if asked for. Collective."""
        return self._valid_numbers() if self._my_rank == 0 or self._compute_on_all_ranks else []

    def local_compute(self) -> list[MetricComputationReport]:
        """Return the numbers of this rank's samples."""
        return self._valid_numbers()

    def _valid_numbers(self) -> list[MetricComputationReport]:
        """Return the numbers; with `should_validate_update` 0 for tasks without a sample of any weight."""
        found = self._compute()
        if not self._should_validate_update:
            return found
        seen = self.has_valid_update.bool()
        for report in found:
            mask = seen.reshape(-1, *[1] * (report.value.dim() - 1)) if report.value.dim() else seen[0]
            report.value = torch.where(mask, report.value, torch.zeros_like(report.value))
        return found

    @property
    def _is_synced(self) -> bool:
        return self._own is not None

    def sync(self) -> None:
        """Put the states of all ranks' samples into the place of this rank's, until `unsync`. Collective."""
        if self._is_synced:
            raise RecMetricException("metrics: sync was called twice. Call unsync before the second time.")
        group = self._group()
        if not has_others(group):
            return
        own = {name: getattr(self, name) for name in self._defaults}
        together = {name: self._together(name, state, group) for name, state in own.items()}
        self._own = own
        for name, state in together.items():
            setattr(self, name, state)

    def _together(self, name: str, own: State, group: dist.ProcessGroup) -> State:
        reduction = self._reductions[name]
        if isinstance(own, torch.Tensor):
            stacked = comm.all_gather(own.unsqueeze(0), group)
            return stacked if reduction is None else reduction(stacked)
        given: list[list[torch.Tensor]] = [[] for _ in range(group.size())]
        dist.all_gather_object(given, [state.detach().cpu() for state in own], group)
        states = [state for one in given for state in one]
        return reduction(states) if reduction is not None and states else states

    def unsync(self) -> None:
        """Put this rank's states back."""
        if self._own is None:
            raise RecMetricException("metrics: unsync was called without a sync before it.")
        own, self._own = self._own, None
        for name, state in own.items():
            setattr(self, name, state)

    def reset(self) -> None:
        """Forget everything."""
        self._own = None
        for name, default in self._defaults.items():
            if isinstance(default, torch.Tensor):
                setattr(self, name, default.to(getattr(self, name).device, copy=True))
            else:
                setattr(self, name, [])
        if self._batch_window_buffers is not None:
            self._batch_window_buffers = {name: self._new_buffer() for name in self._batch_window_buffers}

    # Lists are no buffers: they move and are saved here.
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True):
        super()._apply(fn, recurse)
        for name, default in self._defaults.items():
            if isinstance(default, list):
                setattr(self, name, [fn(state) for state in getattr(self, name)])
        return self

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._saved_lists:
            destination[prefix + name] = [state.detach().clone() for state in getattr(self, name)]

    def _load_from_state_dict(self, state_dict, prefix: str, *args: Any) -> None:
        for name in self._saved_lists:
            if prefix + name in state_dict:
                setattr(self, name, list(state_dict.pop(prefix + name)))
        super()._load_from_state_dict(state_dict, prefix, *args)
