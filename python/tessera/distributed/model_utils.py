"""The names of nemo_rl.distributed.model_utils, on Tessera's engine.

`vocab_start_index` and `vocab_end_index` are this rank's range of ids, `group` (newer name:
`tp_group`) the ranks that share the vocabulary. Everything is collective over it. With
`inference_only` results carry no gradient. `chunk_size` is accepted and has no effect where one pass
needs no temporary of the size of the logits. docs/deviations.md lists where numbers differ from the
reference because the reference's are wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C

__all__ = [
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedLogprob",
    "DistributedCrossEntropy",
    "DistributedLogprob",
    "distributed_vocab_topk",
    "from_parallel_hidden_states_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "gather_logits_at_global_indices",
]


def _one_group(
    function: str, group: ProcessGroup | None, tp_group: ProcessGroup | None
) -> ProcessGroup | None:
    if group is not None and tp_group is not None and group is not tp_group:
        raise ValueError(f"vocab.{function}: 'group' and 'tp_group' are two names of one argument. Give one.")
    return group if group is not None else tp_group


def _no_context_group(function: str, cp_group: ProcessGroup | None) -> None:
    if cp_group is not None and cp_group.size() > 1:
        raise ValueError(
            f"vocab.{function}: a sequence sharded over {cp_group.size()} ranks is not supported. "
            "Gather it first, or leave cp_group out."
        )


def _run(ctx: Any, logits: Tensor, inference_only: bool, compute) -> Tensor:
    """Run `compute` on a leaf that shares the logits' memory, and keep its graph for backward."""
    if inference_only:
        ctx.result = None
        with torch.no_grad():
            return compute(logits)
    leaf = logits.detach().requires_grad_(True)
    with torch.enable_grad():
        ctx.result = compute(leaf)
    ctx.leaf = leaf
    return ctx.result.detach()


def _gradient(ctx: Any, grad_output: Tensor) -> Tensor:
    if ctx.result is None:
        raise ValueError("vocab: this was computed with inference_only=True and has no gradient.")
    (gradient,) = torch.autograd.grad(ctx.result, ctx.leaf, grad_output, retain_graph=True)
    return gradient


def _compute_distributed_log_softmax(vocab_parallel_logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's columns of log softmax in the logits' type, rounded once. No gradient.

    >>> import torch
    >>> round(float(_compute_distributed_log_softmax(torch.zeros(1, 8), None)[0, 0]), 4)
    -2.0794
    """
    return _C.compute_distributed_log_softmax(vocab_parallel_logits, group)


class DistributedLogprob(torch.autograd.Function):
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

        def compute(logits: Tensor) -> Tensor:
            return _C.distributed_logprob(logits, target, vocab_start_index, vocab_end_index, group)

        return _run(ctx, vocab_parallel_logits, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        """Return (one-hot - softmax) times the upstream gradient of each token."""
        return _gradient(ctx, grad_outputs[0]), None, None, None, None, None, None


class ChunkedDistributedLogprob(torch.autograd.Function):
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

        def compute(logits: Tensor) -> Tensor:
            return _C.distributed_logprob(logits, target, vocab_start_index, vocab_end_index, tp_group)

        return _run(ctx, vocab_parallel_logits, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        return _gradient(ctx, grad_outputs[0]), None, None, None, None, None, None


class ChunkedDistributedGatherLogprob(torch.autograd.Function):
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

        def compute(logits: Tensor) -> Tensor:
            return _C.distributed_gather_logprob(
                logits, global_indices, vocab_start_index, vocab_end_index, tp_group
            )

        return _run(ctx, vocab_parallel_logits, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        return _gradient(ctx, grad_outputs[0]), None, None, None, None, None, None


class ChunkedDistributedEntropy(torch.autograd.Function):
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

        def compute(logits: Tensor) -> Tensor:
            return _C.distributed_entropy(logits, tp_group)

        return _run(ctx, vocab_parallel_logits, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        return _gradient(ctx, grad_outputs[0]), None, None, None


class DistributedCrossEntropy(torch.autograd.Function):
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

        def compute(logits: Tensor) -> Tensor:
            return _C.distributed_cross_entropy(logits, target_logits, group)

        return _run(ctx, student_logits, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the student's logits."""
        return _gradient(ctx, grad_outputs[0]), None, None, None


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup | None = None,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    *,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Return log-probabilities of the next token, [batch, length - 1].

    Logits [batch, length, columns] may be longer than the tokens [batch, length].

    >>> import torch
    >>> tokens = torch.zeros(2, 5, dtype=torch.long)
    >>> from_parallel_logits_to_logprobs(torch.zeros(2, 5, 8), tokens, 0, 8).shape
    torch.Size([2, 4])
    """
    _no_context_group("from_parallel_logits_to_logprobs", cp_group)
    chosen = _one_group("from_parallel_logits_to_logprobs", group, tp_group)
    return _C.from_parallel_logits_to_logprobs(
        vocab_parallel_logits, target, vocab_start_index, vocab_end_index, chosen, inference_only
    )


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup | None = None,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    target_is_pre_rolled: bool = False,
    *,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Return next-token log-probabilities of packed sequences, [sequences, unpacked_seqlen - 1].

    Logits are [1, total, columns], tokens [1, total]; `cu_seqlens_padded` holds the starts and the
    end of the last. Places behind the end of a sequence are 0; a longer sequence is cut off.

    >>> import torch
    >>> starts = torch.tensor([0, 3, 5])
    >>> tokens = torch.zeros(1, 5, dtype=torch.long)
    >>> from_parallel_logits_to_logprobs_packed_sequences(torch.zeros(1, 5, 8), tokens, starts, 4, 0, 8).shape
    torch.Size([2, 3])
    """
    _no_context_group("from_parallel_logits_to_logprobs_packed_sequences", cp_group)
    chosen = _one_group("from_parallel_logits_to_logprobs_packed_sequences", group, tp_group)
    return _C.from_parallel_logits_to_logprobs_packed_sequences(
        vocab_parallel_logits,
        target,
        cu_seqlens_padded,
        unpacked_seqlen,
        vocab_start_index,
        vocab_end_index,
        chosen,
        inference_only,
        target_is_pre_rolled,
    )


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight: Tensor,
    runtime_gather_output: bool,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup | None = None,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return next-token log-probabilities, [batch, length - 1], without holding all logits.

    Hidden states are sharded along the sequence ([length / ranks, batch, features]), the weight by
    the vocabulary ([columns, features]); the target is [batch, length]. `chunk_size` bounds the
    tokens of a sequence whose logits exist at a time. `runtime_gather_output` has no effect.

    >>> import torch
    >>> hidden, weight = torch.zeros(4, 2, 3), torch.zeros(8, 3)
    >>> target = torch.zeros(2, 4, dtype=torch.long)
    >>> from_parallel_hidden_states_to_logprobs(hidden, weight, False, target, 0, 8).shape
    torch.Size([2, 3])
    """
    _no_context_group("from_parallel_hidden_states_to_logprobs", cp_group)
    return _C.from_parallel_hidden_states_to_logprobs(
        tensor_parallel_hidden_states,
        output_weight,
        target,
        vocab_start_index,
        vocab_end_index,
        tp_group,
        inference_only,
        chunk_size,
    )


def distributed_vocab_topk(
    vocab_parallel_logits: Tensor,
    k: int,
    tp_group: ProcessGroup | None = None,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of every token and their ids. No gradient.

    >>> import torch
    >>> values, ids = distributed_vocab_topk(
    ...     torch.tensor([[[1.0, 3.0, 2.0]]]), 2, vocab_start_index=0, vocab_end_index=3
    ... )
    >>> ids.tolist()
    [[[1, 2]]]
    """
    return _C.distributed_vocab_topk(vocab_parallel_logits, k, tp_group, vocab_start_index, vocab_end_index)


def gather_logits_at_global_indices(
    vocab_parallel_logits: Tensor,
    global_indices: Tensor,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> Tensor:
    """Return the logits at `global_indices`, [..., k], float32. Differentiable.

    >>> import torch
    >>> ids = torch.tensor([[[2, 0]]])
    >>> gather_logits_at_global_indices(
    ...     torch.tensor([[[1.0, 3.0, 2.0]]]), ids, vocab_start_index=0, vocab_end_index=3
    ... ).tolist()
    [[[2.0, 1.0]]]
    """
    _no_context_group("gather_logits_at_global_indices", cp_group)
    return _C.gather_logits_at_global_indices(
        vocab_parallel_logits, global_indices, tp_group, vocab_start_index, vocab_end_index
    )
