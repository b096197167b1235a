"""What all pipelines do with a batch. When, the engine's loop decides (`tessera/pipeline/loop.h`)."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from tessera import _C
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


class _Slot:
    def __init__(self, batch: Any, context: TrainPipelineContext) -> None:
        self.batch = batch
        self.context = context
        self.losses: Any = None
        self.output: Any = None


class TrainPipeline(abc.ABC, Generic[In, Out]):
    """Train on one batch at a time."""

    @abc.abstractmethod
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on one batch and return the model's output. Raise StopIteration at the end."""

    def reset(self) -> None:
        """Forget what the pipeline holds; one that holds nothing does nothing."""


class _Stages:
    """Be a pipeline as the engine's loop calls it, whose `_backward` takes a batch, users' the losses."""

    def __init__(self, pipeline: _Pipeline) -> None:
        self._pipeline = pipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def _backward(self, slot: _Slot) -> None:
        self._pipeline._run_backward(slot)


# Steps of torchrec's pipelines that its users may replace and no loop calls here.
_NOT_CALLED = frozenset(
    [
        "enqueue_batch",
        "dequeue_batch",
        "start_sparse_data_dist",
        "wait_sparse_data_dist",
        "_start_sparse_data_dist",
        "_wait_sparse_data_dist",
        "_fill_pipeline",
        "_pipeline_model",
        "_init_pipelined_modules",
        "_set_module_context",
        "_copy_batch_to_gpu",
        "inplace_copy_batch_to_gpu",
        "_wait_for_batch",
        "start_embedding_lookup",
        "wait_embedding_lookup",
        "embedding_backward",
        "extract_model_input_from_batch",
        "_mlp_forward",
        "_mlp_optimizer_step",
        "_grad_swap",
        "register_backward_hook",
    ]
)


class _Pipeline(TrainPipeline[In, Out]):
    """Input dists are started `_lead` batches ahead. The engine's loop calls the methods under "stages".

    Classes of users may replace what is under "hooks", which have torchrec's names.
    """

    _lead = 1
    _trains = True
    _prefetches = False
    _syncs_replicas = False  # of a DMPCollection
    _forward: type[BaseForward] = PipelinedForward
    _context: type[TrainPipelineContext] = TrainPipelineContext

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unused = sorted(_NOT_CALLED & set(vars(cls)))
        if unused:
            warnings.warn(
                f"pipeline: {cls.__name__} has {', '.join(unused)}, which no step of a pipeline calls here. "
                "_next_batch, copy_batch_to_gpu, _create_context, _backward and _optimizer_step are called.",
                stacklevel=2,
            )

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
        self._num_needed = 1 if execute_all_batches else self._lead + 2
        self._custom_forward = custom_model_fwd
        self._context = context_type or self._context
        self._sync_interval = dmp_collection_sync_interval_batches if self._syncs_replicas else None
        self._postprocs: dict[str, nn.Module] = {}
        self._loop = self._make_loop()
        self._losses: torch.Tensor | None = None
        self._forwards = [
            self._forward(name, args, find_module(model, name), self._context(), None)
            for name, args in self._find(modules, pipeline_postproc).items()
        ]
        if apply_jit:
            self._script()

    def _make_loop(self, ahead_from: int = 0) -> _C.pipeline.Loop:
        return _C.pipeline.Loop(
            _C.pipeline.LoopOptions(
                lead=self._lead,
                needed=self._num_needed,
                prefetches=self._prefetches,
                ahead_from=ahead_from,
            )
        )

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
        return self._loop.num_in_flight

    @property
    def report(self) -> StepReport:
        """Return where the time of the last step went."""
        found = self._loop.report
        return StepReport(**{part.name: getattr(found, part.name) for part in fields(StepReport)})

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
        self._loop.reset()

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Read and send what the first `progress` would. Collective."""
        self._loop.fill(_Stages(self), dataloader_iter)

    def has_another_after(self, dataloader_iter: Iterator[In]) -> bool:
        """Tell whether a batch will be trained on after that of the next `progress`. Reads ahead."""
        return self._loop.read_until(_Stages(self), dataloader_iter, self._num_needed + 1)

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on one batch and return the model's output. Raise StopIteration at the end. Collective."""
        if self._loop.has_failed:
            raise RuntimeError(
                "pipeline: an earlier step raised an exception, so the batches in flight are in an unknown "
                "state. Make a new pipeline, or call detach() to drop them."
            )
        with torch.set_grad_enabled(self._trains and torch.is_grad_enabled()):
            done = self._loop.progress(_Stages(self), dataloader_iter)
        if done is None:
            raise StopIteration
        self._losses = done.losses.detach() if isinstance(done.losses, torch.Tensor) else None
        return done.output

    # ---- hooks ----

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        """Return the next batch; None at the end."""
        return next(dataloader_iter, None)

    def _create_context(self) -> TrainPipelineContext:
        """Return what goes with a batch from its reading to its step."""
        return self._context()

    def copy_batch_to_gpu(
        self, dataloader_iter: Iterator[In]
    ) -> tuple[In | None, TrainPipelineContext | None]:
        """Return the next batch, on the device if it has `to`, and its context; None at the end."""
        batch = self._next_batch(dataloader_iter)
        if batch is None:
            return None, None
        if hasattr(batch, "to"):
            batch = batch.to(self._device, non_blocking=True)
        return batch, self._create_context()

    def _backward(self, losses: torch.Tensor) -> None:
        """Compute gradients."""
        losses.sum().backward()

    def _optimizer_step(self) -> None:
        """Step the optimizer."""
        if self._optimizer is not None:
            self._optimizer.step()

    # ---- stages, in the order of a batch ----

    def _read(self, batches: Iterator[In]) -> _Slot | None:
        batch, context = self.copy_batch_to_gpu(batches)
        if batch is None:
            return None
        return _Slot(batch, self._create_context() if context is None else context)

    def _start(self, slot: _Slot) -> int:
        with shared_sizes(), slot.context.recording(self._postprocs):
            return sum(forward.start(slot.batch, slot.context) for forward in self._forwards)

    def _wait_sizes(self, slot: _Slot) -> None:
        slot.context.wait_sizes()

    def _wait_ids(self, slot: _Slot) -> None:
        slot.context.wait_ids()

    def _prefetch(self, slot: _Slot) -> None:
        """Use the ids that are here, once for every batch, where `_prefetches`."""

    def _is_training(self) -> bool:
        """Tell whether batches are trained on: a model in eval mode is called alone."""
        return self._trains and self._model.training

    def _zero_grad(self) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def _run_forward(self, slot: _Slot) -> None:
        slot.losses, slot.output = self._call(slot)

    def _run_backward(self, slot: _Slot) -> None:
        self._backward(slot.losses)
        self._sync()

    def _sync(self) -> None:
        """Average the tables of replicas where it is time. Collective."""
        is_time = self._sync_interval is not None and self._loop.num_trained % self._sync_interval == 0
        if is_time and isinstance(self._model, DMPCollection):
            self._model.sync()

    def _step(self) -> None:
        self._optimizer_step()

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
