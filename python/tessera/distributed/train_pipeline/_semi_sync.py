"""A pipeline whose rows are one step old."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import nn

from tessera.distributed._pipelined_modules import (
    EmbeddingPipelinedForward,
    EmbeddingTrainPipelineContext,
    Extractor,
)
from tessera.distributed.train_pipeline._pipeline import In, Out, _Pipeline, _Slot


class TrainPipelineSemiSync(_Pipeline[In, Out]):
    """Look up the rows of batch i+1 before the backward of batch i, so that they travel while it computes.

    From batch `start_batch` on (counted from 0) rows are those of the step before the last. With
    `stash_gradients` the optimizer is as late: it steps by the gradients of the batch before. Before
    `start_batch` the results are those of TrainPipelineSparseDist.

    The optimizer must not hold the parameters of tables, which step in backward: ValueError with `strict`,
    else a warning. Four batches are in flight.
    """

    _lead = 2
    _prefetches = True
    _syncs_replicas = True
    _forward = EmbeddingPipelinedForward
    _context = EmbeddingTrainPipelineContext

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        start_batch: int = 900,
        stash_gradients: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[In], tuple[torch.Tensor, Out]] | None = None,
        strict: bool = False,
        dmp_collection_sync_interval_batches: int | None = 1,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        *,
        modules: Mapping[str, Extractor] | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            apply_jit,
            None,
            pipeline_postproc,
            custom_model_fwd,
            dmp_collection_sync_interval_batches,
            modules=modules,
        )
        self._start_batch = start_batch
        self._loop = self._make_loop(ahead_from=start_batch)
        self._stashes = stash_gradients
        self._stash: dict[str, torch.Tensor] = {}
        self._check_optimizer(strict)

    def _check_optimizer(self, strict: bool) -> None:
        stepped = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        for forward in self._forwards:
            if any(id(parameter) in stepped for parameter in forward.module.parameters()):
                text = (
                    f"pipeline: the optimizer steps parameters of '{forward.name}', whose rows are looked up "
                    "a step ahead. Let them step in backward (apply_optimizer_in_backward)."
                )
                if strict:
                    raise ValueError(text)
                warnings.warn(text, stacklevel=3)

    def is_semi_sync(self) -> bool:
        """Tell whether the next batch's rows were looked up before the last batch changed them."""
        return self._loop.num_in_flight > 0 and self._loop.num_trained >= self._start_batch

    def reset(self) -> None:
        """Drop the batches in flight, and gradients that were kept."""
        super().reset()
        self._stash.clear()

    def _prefetch(self, slot: _Slot) -> None:
        for forward in self._forwards:
            forward.look_up(slot.context)

    def _run_backward(self, slot: _Slot) -> None:
        self._backward(slot.losses)
        slot.context.embedding_backward()
        self._sync()

    def _step(self) -> None:
        index = self._loop.num_trained - 1  # its backward has run
        if not self._stashes or index < self._start_batch:
            self._optimizer_step()
            return
        for name, parameter in self._model.named_parameters():
            kept = self._stash.pop(name, None)
            if parameter.grad is not None:
                self._stash[name] = parameter.grad.clone()
            parameter.grad = kept
        if index > self._start_batch:  # at first nothing is kept
            self._optimizer_step()
