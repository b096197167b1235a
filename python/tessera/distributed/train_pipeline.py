"""Training loops that send the ids of later batches while an earlier one computes.

Nothing is traced: the sharded modules are named, each with a function that finds its features in a
batch. The model is called as always; a pipelined module ignores what its forward is given and computes
with the ids that were sent ahead.

    >>> pipeline = TrainPipelineSparseDist(
    ...     model, optimizer, device, modules={"ebc": lambda batch: batch.sparse}
    ... )  # doctest: +SKIP
    >>> batches = iter(loader)  # doctest: +SKIP
    >>> while True:  # doctest: +SKIP
    ...     try:
    ...         output = pipeline.progress(batches)
    ...     except StopIteration:
    ...         break

All ranks make the same pipeline and have the same number of batches. Results equal those of the plain
loop bit for bit. After an exception other than StopIteration a pipeline cannot be used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = [
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
]

Extractor = Callable[[Any], Any]


class _Input:
    """The ids of one batch for one module, on their way."""

    def __init__(self, module: nn.Module, features: Any) -> None:
        self.context = module.create_context()
        self.sizes = module.input_dist(self.context, features)
        self.ids = None

    def wait_sizes(self) -> None:
        if self.ids is None:
            self.ids = self.sizes.wait()

    def wait_ids(self) -> None:
        self.wait_sizes()
        self.ids.wait()


class _PipelinedForward:
    """Stands in for the forward of a sharded module."""

    def __init__(self, name: str, module: nn.Module, extractor: Extractor) -> None:
        self.name = name
        self.module = module
        self.extractor = extractor
        self.original = module.forward
        self.input: _Input | None = None
        module.forward = self

    def start(self, batch: Any) -> _Input:
        features = self.extractor(batch)
        weights = features.weights_or_none()
        if weights is not None and weights.requires_grad:
            raise ValueError(
                f"pipeline: the weights of '{self.name}' need a gradient, so they come from parameters "
                "that earlier batches still change. Run this module outside of the pipeline."
            )
        return _Input(self.module, features)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.input is None:
            raise ValueError(
                f"pipeline: '{self.name}' was called twice in one forward, or outside of progress(). "
                "Neither can be pipelined; detach() gives the module its own forward back."
            )
        taken, self.input = self.input, None
        return self.module.compute_and_output_dist(taken.context, taken.ids.wait())

    def check_used(self) -> None:
        if self.input is not None:
            raise ValueError(
                f"pipeline: forward did not call '{self.name}'. Do not name modules that a forward may skip."
            )


class _Slot:
    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.inputs: list[_Input] | None = None


class _Pipeline:
    """The one loop: input dists are started `_lead` batches ahead."""

    _lead = 1
    _trains = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        execute_all_batches: bool = True,
        *,
        modules: Mapping[str, Extractor] | None = None,
    ) -> None:
        """Raise ValueError for a module that does not exist, is not sharded, or has no extractor."""
        self._model = model
        self._optimizer = optimizer
        self._device = torch.device(device)
        self._execute_all_batches = execute_all_batches
        self._slots: deque[_Slot] = deque()
        self._ended = False
        self._forwards: list[_PipelinedForward] = []
        self.losses: torch.Tensor | None = None
        found = [(name, self._find(name), extractor) for name, extractor in (modules or {}).items()]
        for name, module, extractor in found:
            if not callable(extractor):
                raise ValueError(
                    f"pipeline: '{name}' has no extractor. Say which features of a batch it takes."
                )
            if any(module is other for _, other, _ in found[: [n for n, _, _ in found].index(name)]):
                raise ValueError(f"pipeline: '{name}' is registered under another name as well.")
        self._forwards = [_PipelinedForward(*one) for one in found]

    def _find(self, name: str) -> nn.Module:
        try:
            module = self._model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"pipeline: the model has no module '{name}'.") from None
        steps = ("create_context", "input_dist", "compute_and_output_dist")
        if not all(hasattr(module, step) for step in steps):
            raise ValueError(
                f"pipeline: '{name}' is no sharded module. Modules that are not sharded need not be named."
            )
        return module

    @property
    def num_in_flight(self) -> int:
        """Return how many batches were read and not yet trained on."""
        return len(self._slots)

    def detach(self) -> nn.Module:
        """Give the modules their own forward back and return the model."""
        for forward in self._forwards:
            if forward.module.__dict__.get("forward") is forward:
                del forward.module.forward
        self._forwards = []
        self._slots.clear()
        return self._model

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on one batch and return the model's output. Raise StopIteration at the end."""
        self._fill(dataloader_iter)
        if not self._slots or (self._ended and not self._execute_all_batches):
            self._slots.clear()
            self._ended = False
            raise StopIteration
        with torch.set_grad_enabled(self._trains and torch.is_grad_enabled()):
            return self._run(dataloader_iter)

    def _load(self, batches: Iterator[Any]) -> None:
        if self._ended:
            return
        try:
            batch = next(batches)
        except StopIteration:
            self._ended = True
            return
        if hasattr(batch, "to"):
            batch = batch.to(self._device, non_blocking=True)
        self._slots.append(_Slot(batch))

    def _start(self, slot: _Slot) -> None:
        slot.inputs = [forward.start(slot.batch) for forward in self._forwards]

    def _fill(self, batches: Iterator[Any]) -> None:
        while len(self._slots) < self._lead + 1 and not self._ended:
            self._load(batches)
        for slot in list(self._slots)[: self._lead]:
            if slot.inputs is None:
                self._start(slot)
                for one in slot.inputs:
                    one.wait_sizes()

    def _run(self, batches: Iterator[Any]) -> Any:
        slots = self._slots
        current = slots[0]
        if self._trains and self._optimizer is not None:
            self._optimizer.zero_grad()
        if current.inputs is None:
            self._start(current)
        for forward, one in zip(self._forwards, current.inputs, strict=True):
            one.wait_ids()
            forward.input = one
        later = slots[self._lead] if 0 < self._lead < len(slots) else None
        if later is not None:
            self._start(later)
        self._load(batches)
        losses, output = self._model(current.batch)
        for forward in self._forwards:
            forward.check_used()
        if self._lead > 1 and len(slots) > 1:
            for one in slots[1].inputs:
                one.wait_ids()
        if later is not None:
            for one in later.inputs:
                one.wait_sizes()
        if self._trains:
            losses.sum().backward()
            if self._optimizer is not None:
                self._optimizer.step()
        self.losses = losses.detach() if isinstance(losses, torch.Tensor) else None
        slots.popleft()
        return output


class TrainPipelineBase(_Pipeline):
    """Read the next batch before the current one computes; train on the last batch too.

    The model takes a batch and returns (losses, output); backward runs on the sum of the losses. A batch
    that has `to` is copied to the device.
    """

    _lead = 0


class TrainPipelineSparseDist(_Pipeline):
    """Keep three batches in flight: i computes, the ids of i+1 travel, i+2 is read.

    `modules` maps the path of each sharded module to a function from a batch to its KeyedJaggedTensor.
    """


class PrefetchTrainPipelineSparseDist(_Pipeline):
    """Keep four batches in flight: after the forward of i the ids of i+1 are waited for and checked."""

    _lead = 2


class EvalPipelineSparseDist(_Pipeline):
    """As TrainPipelineSparseDist, without gradients: the model alone is called."""

    _trains = False
