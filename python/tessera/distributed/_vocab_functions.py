"""Functions of logits whose columns are spread over ranks, each with its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C, _kept_graph, _vocab_ops
from tessera._tensors import local_part, vocab_part


def _compute_distributed_log_softmax(vocab_parallel_logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's columns of log softmax in the logits' type, rounded once. No gradient.

    >>> import torch
    >>> round(float(_compute_distributed_log_softmax(torch.zeros(1, 8), None)[0, 0]), 4)
    -2.0794
    """
    logits, group, columns = vocab_part("_compute_distributed_log_softmax", vocab_parallel_logits, group)
    if columns is None:
        return _C.compute_distributed_log_softmax(logits, group)
    with torch.no_grad():
        return _C.vocab_log_softmax(logits, group, _C.TokenOptions(columns=columns))


def _compute_distributed_log_softmax_with_grad(vocab_parallel_logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's columns of log softmax, differentiably.

    >>> import torch
    >>> _compute_distributed_log_softmax_with_grad(torch.zeros(1, 8, requires_grad=True), None).requires_grad
    True
    """
    logits, group, columns = vocab_part(
        "_compute_distributed_log_softmax_with_grad", vocab_parallel_logits, group
    )
    if columns is None:
        return _C.compute_distributed_log_softmax_with_grad(logits, group)
    return _C.vocab_log_softmax(logits, group, _C.TokenOptions(columns=columns))


def _compute_distributed_softmax(vocab_parallel_logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's columns of the softmax. No gradient.

    >>> import torch
    >>> round(float(_compute_distributed_softmax(torch.zeros(1, 8), None)[0, 0]), 4)
    0.125
    """
    logits, group, columns = vocab_part("_compute_distributed_softmax", vocab_parallel_logits, group)
    if columns is None:
        return _C.compute_distributed_softmax(logits, group)
    with torch.no_grad():
        options = _C.TokenOptions(columns=columns)
        return _C.vocab_log_softmax(logits.float(), group, options).exp_().to(logits.dtype)


class DistributedLogprob(_kept_graph.EngineFunction):
    """Log-probabilities of targets that are already shifted, float32.

    >>> import torch
    >>> logits = torch.zeros(1, 2, 8, requires_grad=True)
    >>> value = DistributedLogprob.apply(logits, torch.tensor([[3, 4]]), 0, 8, None)
    >>> value.sum().backward()
    >>> logits.grad[0, 0, 3].item()
    0.875
    """

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Return log p of `target`. A target of -100 gives 0 and no gradient."""
        own, group, columns = vocab_part(
            "DistributedLogprob", vocab_parallel_logits, group, (vocab_start_index, vocab_end_index)
        )

        def compute(logits: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return _vocab_ops.label_log_probabilities(logits, local_part(target), columns, group)
            return _C.distributed_logprob(logits, local_part(target), *columns, group)

        return _kept_graph.run(ctx, own, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        """Return (one-hot - softmax) times the upstream gradient of each token."""
        return _kept_graph.gradient(ctx, grad_outputs[0]), None, None, None, None, None, None


class ChunkedDistributedLogprob(_kept_graph.EngineFunction):
    """DistributedLogprob under the name that takes a chunk size; one pass needs none."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Return log p of `target`."""
        return DistributedLogprob.forward(
            ctx, vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        return _kept_graph.gradient(ctx, grad_outputs[0]), None, None, None, None, None, None


class DistributedLogprobWithSampling(_kept_graph.EngineFunction):
    """Log-probabilities under top-k and top-p filters, float32.

    >>> import torch
    >>> logits = torch.tensor([[[0.0, 0.0, -1.0, -2.0]]])
    >>> value = DistributedLogprobWithSampling.apply(logits, torch.tensor([[1]]), None, 2, 1.0)
    >>> round(float(value), 4)
    -0.6931
    """

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: ProcessGroup,
        top_k: int | None,
        top_p: float,
        inference_only: bool = False,
    ) -> Tensor:
        """Return log p of `target` among the kept ids; -inf if it is none. A top_k of 0 or less is off."""
        own, group, columns = vocab_part("DistributedLogprobWithSampling", vocab_parallel_logits, tp_group)

        def compute(logits: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return _vocab_ops.filtered_log_probabilities(
                    logits, local_part(target), columns, group, top_k, top_p
                )
            return _C.distributed_logprob_with_sampling(
                logits, local_part(target), group, top_k, top_p, columns
            )

        return _kept_graph.run(ctx, own, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        return _kept_graph.gradient(ctx, grad_outputs[0]), None, None, None, None, None


class ChunkedDistributedLogprobWithSampling(_kept_graph.EngineFunction):
    """DistributedLogprobWithSampling under the name that takes a chunk size; one pass needs none."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: ProcessGroup,
        top_k: int | None,
        top_p: float,
        chunk_size: int,
        inference_only: bool = False,
    ) -> Tensor:
        """Return log p of `target` among the kept ids."""
        return DistributedLogprobWithSampling.forward(
            ctx, vocab_parallel_logits, target, tp_group, top_k, top_p, inference_only
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        return _kept_graph.gradient(ctx, grad_outputs[0]), None, None, None, None, None, None


class ChunkedDistributedGatherLogprob(_kept_graph.EngineFunction):
    """Log-probabilities at k ids per token."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        global_indices: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Return log p at `global_indices`, [..., k], float32."""
        own, group, columns = vocab_part(
            "ChunkedDistributedGatherLogprob",
            vocab_parallel_logits,
            tp_group,
            (vocab_start_index, vocab_end_index),
        )

        def compute(logits: Tensor) -> Tensor:
            return _C.distributed_gather_logprob(logits, local_part(global_indices), *columns, group)

        return _kept_graph.run(ctx, own, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        return _kept_graph.gradient(ctx, grad_outputs[0]), None, None, None, None, None, None


class ChunkedDistributedEntropy(_kept_graph.EngineFunction):
    """The sum of p log p over the vocabulary: minus the entropy, as the reference defines it."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        chunk_size: int,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Return minus the entropy of every token; ids of probability 0 count 0."""
        own, group, columns = vocab_part("ChunkedDistributedEntropy", vocab_parallel_logits, tp_group)

        def compute(logits: Tensor) -> Tensor:
            return _C.distributed_entropy(logits, group, columns)

        return _kept_graph.run(ctx, own, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        return _kept_graph.gradient(ctx, grad_outputs[0]), None, None, None


class DistributedCrossEntropy(_kept_graph.EngineFunction):
    """Cross entropy of a student with a teacher's softmax, per token, float32."""

    @staticmethod
    def forward(
        ctx: Any,
        student_logits: Tensor,
        target_logits: Tensor,
        group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Return the cross entropy; the gradient goes to the student alone."""
        own, group, columns = vocab_part("DistributedCrossEntropy", student_logits, group)

        def compute(logits: Tensor) -> Tensor:
            return _C.distributed_cross_entropy(logits, local_part(target_logits), group, columns)

        return _kept_graph.run(ctx, own, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the student's logits."""
        return _kept_graph.gradient(ctx, grad_outputs[0]), None, None, None


class ChunkedDistributedHiddenStatesToLogprobs:
    """Log-probabilities of shifted targets from hidden states sharded along the sequence."""

    @staticmethod
    def apply(
        tensor_parallel_hidden_states: Tensor,
        target: Tensor,
        output_weight_layer: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Tensor:
        """Return log p of `target`, [batch, length], without holding all logits.

        >>> import torch
        >>> hidden, weight = torch.zeros(4, 2, 3), torch.zeros(8, 3)
        >>> target = torch.zeros(2, 4, dtype=torch.long)
        >>> ChunkedDistributedHiddenStatesToLogprobs.apply(hidden, target, weight, 0, 8, 2, None).shape
        torch.Size([2, 4])
        """
        weight, group, columns = vocab_part(
            "ChunkedDistributedHiddenStatesToLogprobs",
            output_weight_layer,
            tp_group,
            (vocab_start_index, vocab_end_index),
            dim=0,
        )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return _C.distributed_hidden_states_to_logprobs(
                local_part(tensor_parallel_hidden_states),
                local_part(target),
                weight,
                *columns,
                chunk_size,
                group,
            )
