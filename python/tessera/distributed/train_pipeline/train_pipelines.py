"""Training loops that send the ids of later batches while an earlier one computes.

    >>> pipeline = TrainPipelineSparseDist(model, optimizer, device)  # doctest: +SKIP
    >>> batches = iter(loader)  # doctest: +SKIP
    >>> while True:  # doctest: +SKIP
    ...     try:
    ...         output = pipeline.progress(batches)
    ...     except StopIteration:
    ...         break

The sharded modules that take features from the batch as they are (`batch.sparse`, `batch["sparse"]`) are
found by tracing the model's forward. `modules` names them instead, each with a function that finds its
features in a batch: `modules={"ebc": lambda batch: batch.sparse}`. Inside `progress` such a module
computes with the ids that were sent ahead and ignores what its forward is given; outside it is as always.

All ranks make the same pipeline and have the same number of batches. Results equal those of the plain
loop bit for bit. After an exception other than StopIteration a pipeline refuses to go on until `detach`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tessera.distributed._pipelined_modules import (
    ArgInfo,
    BaseForward,
    EmbeddingPipelinedForward,
    EmbeddingTrainPipelineContext,
    Extractor,
    KJTAllToAllForward,
    PipelinedForward,
    PrefetchPipelinedForward,
    PrefetchTrainPipelineContext,
    Tracer,
    TrainPipelineContext,
)
from tessera.distributed.dist_data import SplitsAllToAllAwaitable
from tessera.distributed.embedding_sharding import FusedKJTListSplitsAwaitable, KJTSplitsAllToAllMeta
from tessera.distributed.train_pipeline._pipeline import In, Out, StepReport, TrainPipeline, _Pipeline, _Slot
from tessera.distributed.train_pipeline._semi_sync import TrainPipelineSemiSync

__all__ = [
    "ArgInfo",
    "BaseForward",
    "EmbeddingPipelinedForward",
    "EmbeddingTrainPipelineContext",
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "FusedKJTListSplitsAwaitable",
    "KJTAllToAllForward",
    "KJTSplitsAllToAllMeta",
    "PipelinedForward",
    "PrefetchPipelinedForward",
    "PrefetchTrainPipelineContext",
    "PrefetchTrainPipelineSparseDist",
    "SplitsAllToAllAwaitable",
    "StepReport",
    "TorchCompileConfig",
    "Tracer",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineContext",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePT2",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
]


class TrainPipelineBase(_Pipeline[In, Out]):
    """Read the next batch before the current one computes; train on the last batch too.

    The model takes a batch and returns (losses, output); backward runs on the sum of the losses. A batch
    that has `to` is copied to the device.
    """

    _lead = 0

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        custom_model_fwd: Callable[[In], tuple[torch.Tensor, Out]] | None = None,
        enable_inplace_copy_batch: bool = False,
        *,
        modules: Mapping[str, Extractor] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device, custom_model_fwd=custom_model_fwd, modules=modules)


@dataclass
class TorchCompileConfig:
    """Say how torch.compile is called; `compile_on_iter` is the first step that runs compiled."""

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"
    compile_on_iter: int = 3


class TrainPipelinePT2(TrainPipelineBase[In, Out]):
    """As TrainPipelineBase, with the model compiled by torch.compile from step `compile_on_iter` on.

    `pre_compile_fn` is called with the model before that; `input_transformer` makes what the model takes
    out of a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        compile_configs: TorchCompileConfig | None = None,
        pre_compile_fn: Callable[[nn.Module], None] | None = None,
        post_compile_fn: Callable[[nn.Module], None] | None = None,
        input_transformer: Callable[[In], In] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device)
        self._compile_config = compile_configs or TorchCompileConfig()
        self._before, self._after = pre_compile_fn, post_compile_fn
        self._transform = input_transformer
        self._iteration = 0

    def _compile(self) -> None:
        config = self._compile_config
        if self._before is not None:
            self._before(self._model)
        self._model.compile(backend=config.backend, fullgraph=config.fullgraph, dynamic=config.dynamic)
        if self._after is not None:
            self._after(self._model)

    def _call(self, slot: _Slot) -> tuple[torch.Tensor, Out]:
        if self._iteration == self._compile_config.compile_on_iter:
            self._compile()
        self._iteration += 1
        if self._transform is not None:
            slot.batch = self._transform(slot.batch)
        return super()._call(slot)


class TrainPipelineSparseDist(_Pipeline[In, Out]):
    """Keep three batches in flight: i computes, the ids of i+1 travel, i+2 is read.

    The sizes of all modules of one group travel in one message.
    """

    _syncs_replicas = True


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TrainPipelineSparseDist: here the rows of a batch are looked up in its forward.

    `emb_lookup_stream` and `embedding_lookup_after_data_dist` say where torchrec looks them up ahead, after
    the optimizer's step; the results are the same.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[In], tuple[torch.Tensor, Out]] | None = None,
        strict: bool = False,
        emb_lookup_stream: str = "data_dist",
        embedding_lookup_after_data_dist: bool = False,
        enable_inplace_copy_batch: bool = False,
        enqueue_batch_after_forward: bool = False,
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
            modules=modules,
        )


class TrainPipelineSparseDistLite(TrainPipelineSparseDist[In, Out]):
    """As TrainPipelineSparseDist, which keeps no more in memory than its batches in flight."""

    _syncs_replicas = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] | None = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[In], tuple[torch.Tensor, Out]] | None = None,
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
            True,
            apply_jit,
            context_type,
            pipeline_postproc,
            custom_model_fwd,
            modules=modules,
        )


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Keep four batches in flight: after the forward of i the ids of i+1 are here and given to `prefetch`.

    `prefetch(dist_input, forward_stream, ctx)` of a module brings rows nearer where it knows how.
    """

    _lead = 2
    _prefetches = True
    _syncs_replicas = False
    _forward = PrefetchPipelinedForward
    _context = PrefetchTrainPipelineContext

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[In], tuple[torch.Tensor, Out]] | None = None,
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
            modules=modules,
        )

    def _prefetch(self, slot: _Slot) -> None:
        for forward in self._forwards:
            forward.prefetch(slot.context)


class EvalPipelineSparseDist(_Pipeline[In, Out]):
    """As TrainPipelineSparseDist, without gradients: the model alone is called."""

    _trains = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
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
            apply_jit=apply_jit,
            pipeline_postproc=pipeline_postproc,
            modules=modules,
        )


class EvalPipelineFusedSparseDist(TrainPipelineFusedSparseDist[In, Out]):
    """As TrainPipelineFusedSparseDist, without gradients: the model alone is called.

    `enable_embedding_lookup_prefetch` says when torchrec looks rows up; the results are the same.
    """

    _trains = False
    _syncs_replicas = False

    def __init__(self, *args: Any, enable_embedding_lookup_prefetch: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
