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
from torch.distributed.tensor import DTensor, distribute_tensor

from tessera import _C, regions
from tessera.algorithms.logits_sampling_utils import (
    TrainingSamplingParams,
    apply_top_k_top_p,
    need_top_k_or_top_p_filtering,
)

__all__ = [
    "AllGatherCPTensor",
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedHiddenStatesToLogprobs",
    "ChunkedDistributedLogprob",
    "ChunkedDistributedLogprobWithSampling",
    "DistributedCrossEntropy",
    "DistributedLogprob",
    "DistributedLogprobWithSampling",
    "TrainingSamplingParams",
    "all_to_all_sq2vp",
    "all_to_all_vp2sq",
    "allgather_cp_sharded_tensor",
    "apply_top_k_top_p",
    "cp_load_balanced_to_contiguous",
    "cp_shift_next",
    "distributed_vocab_topk",
    "dtensor_from_parallel_logits_to_logprobs",
    "from_parallel_hidden_states_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "gather_logits_at_global_indices",
    "get_distillation_topk_logprobs_from_logits",
    "get_logprobs_from_vocab_parallel_logits",
    "group_all_reduce_sum",
    "group_all_reduce_sum_with_grad",
    "patch_gpt_model_forward_for_linear_ce_fusion",
    "vocab_parallel_argmax",
    "vocab_parallel_full_log_softmax",
    "vocab_parallel_gather_columns",
    "vocab_parallel_log_softmax",
]


def _one_group(
    function: str, group: ProcessGroup | None, tp_group: ProcessGroup | None
) -> ProcessGroup | None:
    if group is not None and tp_group is not None and group is not tp_group:
        raise ValueError(f"vocab.{function}: 'group' and 'tp_group' are two names of one argument. Give one.")
    return group if group is not None else tp_group


def _filters(sampling_params: Any | None) -> tuple[int | None, float] | None:
    if not need_top_k_or_top_p_filtering(sampling_params):
        return None
    return sampling_params.top_k, 1.0 if sampling_params.top_p is None else sampling_params.top_p


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


def _compute_distributed_log_softmax_with_grad(vocab_parallel_logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's columns of log softmax, differentiably.

    >>> import torch
    >>> _compute_distributed_log_softmax_with_grad(torch.zeros(1, 8, requires_grad=True), None).requires_grad
    True
    """
    return _C.compute_distributed_log_softmax_with_grad(vocab_parallel_logits, group)


def _compute_distributed_softmax(vocab_parallel_logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's columns of the softmax. No gradient.

    >>> import torch
    >>> round(float(_compute_distributed_softmax(torch.zeros(1, 8), None)[0, 0]), 4)
    0.125
    """
    return _C.compute_distributed_softmax(vocab_parallel_logits, group)


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


class DistributedLogprobWithSampling(torch.autograd.Function):
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
        """Return log p of `target` among the kept ids; -inf, without a gradient, if it is none."""

        def compute(logits: Tensor) -> Tensor:
            return _C.distributed_logprob_with_sampling(logits, target, tp_group, top_k, top_p)

        return _run(ctx, vocab_parallel_logits, inference_only, compute)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        return _gradient(ctx, grad_outputs[0]), None, None, None, None, None


class ChunkedDistributedLogprobWithSampling(torch.autograd.Function):
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

        def compute(logits: Tensor) -> Tensor:
            return _C.distributed_logprob_with_sampling(logits, target, tp_group, top_k, top_p)

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
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return _C.distributed_hidden_states_to_logprobs(
                tensor_parallel_hidden_states,
                target,
                output_weight_layer,
                vocab_start_index,
                vocab_end_index,
                chunk_size,
                tp_group,
            )


class AllGatherCPTensor:
    """The whole sequence from load-balanced parts: rank r of n holds pieces r and 2 n - 1 - r."""

    @staticmethod
    def apply(tensor: Tensor, cp_group: ProcessGroup | None, seq_dim: int = 1) -> Tensor:
        """Return the whole in its own order. The ranks' gradients are added up."""
        return _C.gather_context(tensor, cp_group, seq_dim, None)


def allgather_cp_sharded_tensor(tensor: Tensor, cp_group: ProcessGroup | None, seq_dim: int = 1) -> Tensor:
    """Return the whole sequence from load-balanced parts.

    >>> import torch
    >>> allgather_cp_sharded_tensor(torch.zeros(1, 4), None).shape
    torch.Size([1, 4])
    """
    return AllGatherCPTensor.apply(tensor, cp_group, seq_dim)


def _get_tokens_on_this_cp_rank(input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1) -> Tensor:
    """Return the part of a rank: pieces r and 2 n - 1 - r of 2 n equal ones.

    >>> import torch
    >>> _get_tokens_on_this_cp_rank(torch.arange(8).view(1, 8), 0, 2).tolist()
    [[0, 1, 6, 7]]
    """
    return _C.part_of_context_rank(input_ids, cp_rank, cp_size, seq_dim, None)


def cp_load_balanced_to_contiguous(
    x: Tensor, *, cp_group: ProcessGroup | None = None, seq_dim: int = 1
) -> Tensor:
    """Return this rank's consecutive window of the whole sequence from its load-balanced part.

    >>> import torch
    >>> cp_load_balanced_to_contiguous(torch.zeros(1, 4)).shape
    torch.Size([1, 4])
    """
    return _C.context_window(_local(x), cp_group, seq_dim)


def cp_shift_next(x: Tensor, cp_group: ProcessGroup | None = None, *, fill: float) -> Tensor:
    """Return `x` ([batch, window, ...]) moved one place to the left over the whole sequence.

    >>> import torch
    >>> cp_shift_next(torch.tensor([[1, 2, 3]]), fill=0).tolist()
    [[2, 3, 0]]
    """
    return _C.shift_next(x, cp_group, fill)


def group_all_reduce_sum(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum over the group, without a gradient; the tensor itself without a group.

    >>> import torch
    >>> group_all_reduce_sum(torch.ones(1)).item()
    1.0
    """
    if group is None or group.size() <= 1:
        return tensor
    with torch.no_grad():
        return _C.group_sum(tensor, group)


def group_all_reduce_sum_with_grad(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum over the group; the gradient of the sum is every addend's.

    >>> import torch
    >>> group_all_reduce_sum_with_grad(torch.ones(1)).item()
    1.0
    """
    return tensor if group is None or group.size() <= 1 else _C.group_sum(tensor, group)


class _AllReduceSum:
    """group_all_reduce_sum_with_grad as a class with `apply`."""

    @staticmethod
    def apply(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        """Return the sum over the group."""
        return group_all_reduce_sum_with_grad(tensor, group)


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """Return [tokens / ranks, vocabulary] from [tokens, columns]. Differentiable.

    >>> import torch
    >>> all_to_all_vp2sq(torch.zeros(4, 8), None).shape
    torch.Size([4, 8])
    """
    return _C.to_token_shards(vocab_parallel_logits, tp_group)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """Return [tokens, columns] from [tokens / ranks, vocabulary]: the way back of all_to_all_vp2sq.

    >>> import torch
    >>> all_to_all_sq2vp(torch.zeros(4, 8), None).shape
    torch.Size([4, 8])
    """
    return _C.to_vocabulary_shards(seq_parallel_logits, tp_group)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup | None = None,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: Any | None = None,
    *,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Return log-probabilities of the next token, [batch, length - 1].

    Logits [batch, length, columns] may be longer than the tokens [batch, length]. With `cp_group` the
    logits are this rank's part of the sequence, [batch, length / ranks, columns], and tokens and result
    the whole; the ranks' gradients are added up. `sampling_params` (top_k, top_p) filters as a generator.

    >>> import torch
    >>> tokens = torch.zeros(2, 5, dtype=torch.long)
    >>> from_parallel_logits_to_logprobs(torch.zeros(2, 5, 8), tokens, 0, 8).shape
    torch.Size([2, 4])
    """
    chosen = _one_group("from_parallel_logits_to_logprobs", group, tp_group)
    return _C.from_parallel_logits_to_logprobs(
        vocab_parallel_logits,
        target,
        vocab_start_index,
        vocab_end_index,
        chosen,
        inference_only,
        cp_group,
        _filters(sampling_params),
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
    sampling_params: Any | None = None,
    target_is_pre_rolled: bool = False,
    *,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Return next-token log-probabilities of packed sequences, [sequences, unpacked_seqlen - 1].

    Logits are [1, total, columns], tokens [1, total]; `cu_seqlens_padded` holds the starts and the
    end of the last. Places behind the end of a sequence are 0; a longer sequence is cut off. With
    `cp_group` every sequence is cut over its ranks, and tokens that are pre-rolled are this rank's.

    >>> import torch
    >>> starts = torch.tensor([0, 3, 5])
    >>> tokens = torch.zeros(1, 5, dtype=torch.long)
    >>> from_parallel_logits_to_logprobs_packed_sequences(torch.zeros(1, 5, 8), tokens, starts, 4, 0, 8).shape
    torch.Size([2, 3])
    """
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
        cp_group,
        _filters(sampling_params),
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
    return _C.from_parallel_hidden_states_to_logprobs(
        tensor_parallel_hidden_states,
        output_weight,
        target,
        vocab_start_index,
        vocab_end_index,
        tp_group,
        inference_only,
        cp_group,
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
    return _C.gather_logits_at_global_indices(
        vocab_parallel_logits, global_indices, tp_group, cp_group, vocab_start_index, vocab_end_index
    )


def vocab_parallel_log_softmax(
    logits: Tensor, temperature: float, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return this rank's columns of log softmax(logits / temperature), float32. Differentiable.

    >>> import torch
    >>> round(float(vocab_parallel_log_softmax(torch.zeros(1, 1, 8), 2.0)[0, 0, 0]), 4)
    -2.0794
    """
    return _C.vocab_parallel_log_softmax(_local(logits), temperature, tp_group)


def vocab_parallel_full_log_softmax(
    logits: Tensor, temperature: float, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return all columns of log softmax(logits / temperature), float32. Differentiable.

    >>> import torch
    >>> vocab_parallel_full_log_softmax(torch.zeros(1, 1, 8), 1.0).shape
    torch.Size([1, 1, 8])
    """
    return _C.vocab_parallel_full_log_softmax(_local(logits), temperature, tp_group)


def vocab_parallel_gather_columns(
    logits: Tensor, column_indices: Tensor, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return the logits of every token at the same k ids, [..., k], float32. Differentiable.

    >>> import torch
    >>> vocab_parallel_gather_columns(torch.tensor([[[1.0, 3.0, 2.0]]]), torch.tensor([2, 0])).tolist()
    [[[2.0, 1.0]]]
    """
    return _C.vocab_parallel_gather_columns(_local(logits), column_indices, tp_group)


def vocab_parallel_argmax(logits: Tensor, *, tp_group: ProcessGroup | None = None) -> Tensor:
    """Return the best id of every token. No gradient.

    >>> import torch
    >>> vocab_parallel_argmax(torch.tensor([[[1.0, 3.0, 2.0]]])).tolist()
    [[1]]
    """
    return _C.vocab_parallel_argmax(_local(logits), tp_group)


def get_distillation_topk_logprobs_from_logits(
    student_logits: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return next-token log-probabilities of student and teacher at the teacher's best ids.

    Both are [batch, length - 1, k]. With `zero_outside_topk` the student's are those of the whole
    vocabulary, and `calculate_entropy` adds the sum of p log p; otherwise both are normalised over these
    ids alone. `vocab_parallel_rank` must be the rank in the group.

    >>> import torch
    >>> ids = torch.zeros(1, 3, 2, dtype=torch.long)
    >>> student, teacher, _ = get_distillation_topk_logprobs_from_logits(
    ...     torch.zeros(1, 3, 8), torch.zeros(1, 3, 2), ids, True, False
    ... )
    >>> student.shape, round(float(student[0, 0, 0]), 4), round(float(teacher[0, 0, 0]), 4)
    (torch.Size([1, 2, 2]), -2.0794, -0.6931)
    """
    group, cp_group = vocab_parallel_group, context_parallel_group
    if group is None and isinstance(student_logits, DTensor):
        names = student_logits.device_mesh.mesh_dim_names or ()
        group = student_logits.device_mesh.get_group("tp")
        cp_group = student_logits.device_mesh.get_group("cp") if "cp" in names else None
    elif group is not None and vocab_parallel_rank not in (None, group.rank()):
        raise ValueError(
            "vocab.get_distillation_topk_logprobs_from_logits: vocab_parallel_rank is "
            f"{vocab_parallel_rank}, but this is rank {group.rank()} of the group."
        )
    return _C.distillation_topk_logprobs(
        _local(student_logits).float(),
        teacher_topk_logits,
        teacher_topk_indices,
        zero_outside_topk,
        calculate_entropy,
        group,
        cp_group,
    )


def dtensor_from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup | None,
    inference_only: bool = False,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: Any | None = None,
) -> Tensor:
    """Return next-token log-probabilities, [batch, length - 1], of logits that are this rank's part.

    A target that is a DTensor over a mesh with an axis "cp" is sharded along the sequence; `seq_index`
    then says which place of the whole sequence each of its columns is.

    >>> import torch
    >>> tokens = torch.zeros(2, 5, dtype=torch.long)
    >>> dtensor_from_parallel_logits_to_logprobs(torch.zeros(2, 5, 8), tokens, 0, 8, None).shape
    torch.Size([2, 4])
    """
    names = target.device_mesh.mesh_dim_names or () if isinstance(target, DTensor) else ()
    filters = _filters(sampling_params)
    if "cp" not in names or target.device_mesh.get_group("cp").size() == 1:
        whole = target.full_tensor() if isinstance(target, DTensor) else target
        return _C.from_parallel_logits_to_logprobs(
            vocab_parallel_logits,
            whole,
            vocab_start_index,
            vocab_end_index,
            tp_group,
            inference_only,
            None,
            filters,
        )
    if seq_index is None:
        raise ValueError(
            "vocab.dtensor_from_parallel_logits_to_logprobs: a target sharded over 'cp' needs seq_index."
        )
    mesh, placements = target.device_mesh, target.placements
    order = torch.argsort(seq_index)
    shifted = target.full_tensor()[:, order].roll(-1, -1)
    shifted[:, -1] = -100  # nothing follows
    own = distribute_tensor(shifted[:, seq_index], mesh, placements).to_local()
    if filters is None:
        values = DistributedLogprob.apply(
            vocab_parallel_logits, own, vocab_start_index, vocab_end_index, tp_group, inference_only
        )
    else:
        values = DistributedLogprobWithSampling.apply(
            vocab_parallel_logits, own, tp_group, *filters, inference_only
        )
    return DTensor.from_local(values, mesh, placements).full_tensor()[:, order][:, :-1]


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: Tensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: Any | None = None,
) -> Tensor:
    """Return next-token log-probabilities of logits sharded over the axis "tp" of their mesh."""
    group = vocab_parallel_logits.device_mesh.get_group("tp")
    share = vocab_parallel_logits.shape[-1] // group.size()
    return dtensor_from_parallel_logits_to_logprobs(
        vocab_parallel_logits.to_local(),
        input_ids,
        group.rank() * share,
        (group.rank() + 1) * share,
        group,
        inference_only=not torch.is_grad_enabled(),
        seq_index=seq_index,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )


def patch_gpt_model_forward_for_linear_ce_fusion(*, chunk_size: int) -> None:
    """Teach Megatron's GPTModel to return log-probabilities without making logits.

    A call of its forward with `return_logprobs_for_linear_ce_fusion=True` then returns next-token
    log-probabilities of `labels` (or of `input_ids`) instead of logits. Raises ImportError without
    megatron.core. Calling it again changes the chunk size.
    """
    try:
        from megatron.core.models.gpt import GPTModel
    except ImportError as error:
        raise ImportError(
            "vocab.patch_gpt_model_forward_for_linear_ce_fusion: there is no megatron.core to patch."
        ) from error
    GPTModel._linear_ce_fusion_chunk_size = chunk_size
    if getattr(GPTModel, "_linear_ce_fusion_forward_patched", False):
        return
    plain_forward = GPTModel.forward

    def forward(self, input_ids, *words, return_logprobs_for_linear_ce_fusion=False, labels=None, **named):
        if not return_logprobs_for_linear_ce_fusion or not self.post_process:
            return plain_forward(self, input_ids, *words, labels=labels, **named)
        # Without its last step the model returns the hidden states.
        self.post_process = False
        try:
            hidden = plain_forward(self, input_ids, *words, **named)
        finally:
            self.post_process = True
        weight = self.output_layer.weight
        if getattr(self, "share_embeddings_and_output_weights", False):
            weight = self.shared_embedding_or_output_weight()
        group = self.pg_collection.tp
        if not self.config.sequence_parallel and group is not None and group.size() > 1:
            hidden = regions.scatter(hidden, group, 0)
        share = weight.shape[0]
        first = share * (group.rank() if group is not None else 0)
        return from_parallel_hidden_states_to_logprobs(
            hidden,
            weight,
            False,
            input_ids if labels is None else labels,
            first,
            first + share,
            group,
            inference_only=not torch.is_grad_enabled(),
            chunk_size=self._linear_ce_fusion_chunk_size,
        )

    GPTModel._original_forward_for_linear_ce_fusion = plain_forward
    GPTModel.forward = forward
    GPTModel._linear_ce_fusion_forward_patched = True
