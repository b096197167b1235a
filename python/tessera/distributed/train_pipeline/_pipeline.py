"""The one loop of all pipelines, and what it tells of a step."""

from __future__ import annotations

import abc
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from tessera.distributed._pipelined_modules import (
    ArgInfo,
    BaseForward,
    Extractor,
    PipelinedForward,
    TrainPipelineContext,
    _Extracted,
    find_args_and_makers,
    find_module,
)
from tessera.distributed._shared_sizes import shared_sizes
from tessera.distributed.model_parallel import DMPCollection, get_unwrapped_module
from tessera.distributed.utils import get_unsharded_module_names

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass
class StepReport:
    """Say where the time of a step went, in seconds of this rank.

    >>> StepReport(wait_ids=0.25, wait_sizes=0.5).exposed_input_dist
    0.75
    """

    read: float = 0.0  # the source, and the copy to the device
    start_dist: float = 0.0  # extractors, and starting the input dist of a later batch
    wait_ids: float = 0.0  # for the ids of this batch (prefetch: of the next)
    wait_sizes: float = 0.0  # for the sizes of a later batch
    prefetch: float = 0.0
    zero_grad: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0
    total: float = 0.0
    feature_bytes: int = 0  # of this batch, before they were sent

    @property
    def exposed_input_dist(self) -> float:
        """Return the part of the input dist that nothing hid."""
        return self.wait_ids + self.wait_sizes

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the time of the body to a part."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - begin)


_END = object()  # of the batches; StopIteration of a model or extractor is none


class _Slot:
    def __init__(self, batch: Any, context: TrainPipelineContext) -> None:
        self.batch = batch
        self.context = context
        self.is_started = False
        self.feature_bytes = 0


class TrainPipeline(abc.ABC, Generic[In, Out]):
    """Train on one batch at a time."""

    @abc.abstractmethod
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on one batch and return the model's output. Raise StopIteration at the end."""


class _Pipeline(TrainPipeline[In, Out]):
    """The one loop: input dists are started `_lead` batches ahead."""

    _lead = 1
    _trains = True
    _syncs_replicas = False  # of a DMPCollection
    _forward: type[BaseForward] = PipelinedForward
    _context: type[TrainPipelineContext] = TrainPipelineContext

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] | None = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[In], tuple[torch.Tensor, Out]] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        *,
        modules: Mapping[str, Extractor] | None = None,
    ) -> None:
        """Raise ValueError for a module that cannot be pipelined.

        `apply_jit` scripts the modules that hold nothing sharded. With `execute_all_batches` the batches in
        flight are trained on when the iterator has ended; without, a batch is trained on only if those that
        follow it in flight are there. With `pipeline_postproc` modules without parameters that make the
        features of a sharded module out of the batch run ahead, too. `custom_model_fwd` is called with the
        batch instead of the model. A DMPCollection averages its replicas' tables after the backward of every
        `dmp_collection_sync_interval_batches`-th batch, the first one included; None: not at all. The
        arguments after it say how torchrec uses its streams and memory; here they change nothing.
        """
        self._model = model
        self._optimizer = optimizer
        self._device = torch.device(device)
        self._execute_all_batches = execute_all_batches
        self._custom_forward = custom_model_fwd
        self._context = context_type or self._context
        self._sync_interval = dmp_collection_sync_interval_batches if self._syncs_replicas else None
        self._num_trained = 0  # batches
        self._postprocs: dict[str, nn.Module] = {}
        self._slots: deque[_Slot] = deque()
        self._ended = False
        self._has_failed = False  # or is in a step
        self._report = StepReport()
        self._losses: torch.Tensor | None = None
        self._forwards = [
            self._forward(name, args, find_module(model, name), self._context(), None)
            for name, args in self._find(modules, pipeline_postproc).items()
        ]
        if apply_jit:
            self._script()

    def _find(self, modules: Mapping[str, Extractor] | None, runs_ahead: bool) -> dict[str, list[ArgInfo]]:
        if modules is None:
            if not self._lead:
                return {}
            model = get_unwrapped_module(self._model)
            found, self._postprocs = find_args_and_makers(model, runs_ahead)
            return found
        found: list[nn.Module] = []
        for name, extractor in modules.items():
            module = find_module(self._model, name)
            if not callable(extractor):
                raise ValueError(
                    f"pipeline: '{name}' has no extractor. Say which features of a batch it takes."
                )
            if any(module is other for other in found):
                raise ValueError(f"pipeline: '{name}' is registered under another name as well.")
            found.append(module)
        return {name: [_Extracted(extractor)] for name, extractor in modules.items()}

    def _script(self) -> None:
        model = get_unwrapped_module(self._model)
        for name in get_unsharded_module_names(model):
            path, _, child = name.rpartition(".")
            setattr(model.get_submodule(path), child, torch.jit.script(model.get_submodule(name)))

    @property
    def num_in_flight(self) -> int:
        """Return how many batches were read and not yet trained on."""
        return len(self._slots)

    @property
    def report(self) -> StepReport:
        """Return where the time of the last step went."""
        return self._report

    @property
    def losses(self) -> torch.Tensor | None:
        """Return the losses of the last step, without their history."""
        return self._losses

    def detach(self) -> nn.Module:
        """Drop the batches in flight and return the model."""
        self.reset()
        return self._model

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Go on after `detach`, with the same model. Its modules are as always outside of `progress`."""
        if model is not None and model is not self._model:
            raise ValueError("pipeline.attach: this is another model. Make a new pipeline for it.")

    def reset(self) -> None:
        """Drop the batches in flight."""
        self._slots.clear()
        self._ended = False
        self._has_failed = False

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Read and send what the first `progress` would. Collective."""
        self._fill(dataloader_iter, StepReport())

    def has_another_after(self, dataloader_iter: Iterator[In]) -> bool:
        """Tell whether a batch will be trained on after that of the next `progress`. Reads ahead."""
        needed = 2 if self._execute_all_batches else self._lead + 3
        while len(self._slots) < needed and not self._ended:
            self._load(dataloader_iter, StepReport())
        return len(self._slots) >= needed

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on one batch and return the model's output. Raise StopIteration at the end. Collective."""
        if self._has_failed:
            raise RuntimeError(
                "pipeline: an earlier step raised an exception, so the batches in flight are in an unknown "
                "state. Make a new pipeline, or call detach() to drop them."
            )
        self._has_failed = True
        output = self._advance(dataloader_iter)
        self._has_failed = False
        if output is _END:
            raise StopIteration
        return output

    def _advance(self, dataloader_iter: Iterator[In]) -> Any:
        report = StepReport()
        with report.timing("total"):
            self._fill(dataloader_iter, report)
            while not self._execute_all_batches and len(self._slots) < self._lead + 2 and not self._ended:
                self._load(dataloader_iter, report)
            is_last = not self._execute_all_batches and len(self._slots) < self._lead + 2
            if not self._slots or is_last:
                self._slots.clear()
                self._ended = False  # the next call begins anew
                return _END
            with torch.set_grad_enabled(self._trains and torch.is_grad_enabled()):
                output = self._run(dataloader_iter, report)
            report.feature_bytes = self._slots.popleft().feature_bytes
        self._report = report
        return output

    def _load(self, batches: Iterator[In], report: StepReport) -> None:
        if self._ended:
            return
        with report.timing("read"):
            try:
                batch = next(batches)
            except StopIteration:
                self._ended = True
                return
            if hasattr(batch, "to"):
                batch = batch.to(self._device, non_blocking=True)
        self._slots.append(_Slot(batch, self._context()))

    def _start(self, slot: _Slot, report: StepReport) -> None:
        with report.timing("start_dist"), shared_sizes(), slot.context.recording(self._postprocs):
            slot.feature_bytes = sum(forward.start(slot.batch, slot.context) for forward in self._forwards)
        slot.is_started = True

    def _wait_sizes(self, slot: _Slot, report: StepReport) -> None:
        with report.timing("wait_sizes"):
            slot.context.wait_sizes()

    def _wait_ids(self, slot: _Slot, report: StepReport) -> None:
        with report.timing("wait_ids"):
            slot.context.wait_ids()

    # At the beginning: `_lead` batches with their sizes known, and one more that was read.
    def _fill(self, batches: Iterator[In], report: StepReport) -> None:
        while len(self._slots) < self._lead + 1 and not self._ended:
            self._load(batches, report)
        for slot in list(self._slots)[: self._lead]:
            if not slot.is_started:
                self._start(slot, report)
                self._wait_sizes(slot, report)

    def _run(self, batches: Iterator[In], report: StepReport) -> Out:
        slots = self._slots
        current = slots[0]
        if self._is_training() and self._optimizer is not None:
            with report.timing("zero_grad"):
                self._optimizer.zero_grad()
        if not current.is_started:
            self._start(current, report)
        self._arrive(current, report)
        later = slots[self._lead] if 0 < self._lead < len(slots) else None
        if later is not None:
            self._start(later, report)
        if len(slots) < self._lead + 2:
            self._load(batches, report)
        with report.timing("forward"):
            losses, output = self._call(current)
        if self._lead > 1 and len(slots) > 1:
            self._arrive(slots[1], report)
        if later is not None:
            self._wait_sizes(later, report)
        if self._is_training():
            with report.timing("backward"):
                losses.sum().backward()
            self._after_backward()
            if self._optimizer is not None:
                with report.timing("step"):
                    self._optimizer.step()
        self._losses = losses.detach() if isinstance(losses, torch.Tensor) else None
        return output

    def _is_training(self) -> bool:
        """Tell whether batches are trained on: a model in eval mode is called alone."""
        return self._trains and self._model.training

    def _after_backward(self) -> None:
        """Count a batch, and average the tables of replicas where it is time. Collective."""
        is_time = self._sync_interval is not None and self._num_trained % self._sync_interval == 0
        self._num_trained += 1
        if is_time and isinstance(self._model, DMPCollection):
            self._model.sync()

    def _arrive(self, slot: _Slot, report: StepReport) -> None:
        self._wait_ids(slot, report)

    def _call(self, slot: _Slot) -> tuple[torch.Tensor, Out]:
        for forward in self._forwards:
            forward.set_context(slot.context)
            forward.module.__dict__["forward"] = forward
        try:
            with slot.context.replaying(self._postprocs):
                result = (self._custom_forward or self._model)(slot.batch)
        finally:
            for forward in self._forwards:
                del forward.module.__dict__["forward"]
        for forward in self._forwards:
            if not forward.is_used():
                raise ValueError(
                    f"pipeline: forward did not call '{forward.name}'. "
                    "Do not name modules that a forward may skip."
                )
        # A tensor of two rows can be unpacked as well, and would train on the first.
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            given = f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__
            raise ValueError(f"pipeline: the model returns {given}. It has to return (losses, output).")
        losses, output = result
        if self._is_training() and not isinstance(losses, torch.Tensor):
            raise ValueError(
                f"pipeline: the losses that the model returns are a {type(losses).__name__}. They have to be "
                "a tensor, of any shape; backward runs on their sum."
            )
        return losses, output
