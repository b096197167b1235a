"""Sequences cut over ranks, and the way between cuts of the sequence and of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C
from tessera._tensors import group_of, local_part, vocab_part


class AllGatherCPTensor:
    """The whole sequence from load-balanced parts: rank r of n holds pieces r and 2 n - 1 - r."""

    @staticmethod
    def apply(tensor: Tensor, cp_group: ProcessGroup | None, seq_dim: int = 1) -> Tensor:
        """Return the whole in its own order. The ranks' gradients are added up."""
        group = group_of("AllGatherCPTensor", cp_group)
        return _C.gather_context(local_part(tensor), group, seq_dim, None)


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
    return _C.part_of_context_rank(local_part(input_ids), cp_rank, cp_size, seq_dim, None)


def cp_load_balanced_to_contiguous(
    x: Tensor, *, cp_group: ProcessGroup | None = None, seq_dim: int = 1
) -> Tensor:
    """Return this rank's consecutive window of the whole sequence from its load-balanced part.

    >>> import torch
    >>> cp_load_balanced_to_contiguous(torch.zeros(1, 4)).shape
    torch.Size([1, 4])
    """
    return _C.context_window(local_part(x), group_of("cp_load_balanced_to_contiguous", cp_group), seq_dim)


def cp_shift_next(x: Tensor, cp_group: ProcessGroup | None = None, *, fill: float) -> Tensor:
    """Return `x` ([batch, window, ...]) moved one place to the left over the whole sequence.

    >>> import torch
    >>> cp_shift_next(torch.tensor([[1, 2, 3]]), fill=0).tolist()
    [[2, 3, 0]]
    """
    return _C.shift_next(local_part(x), group_of("cp_shift_next", cp_group), fill)


def group_all_reduce_sum(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum over the group, without a gradient; `x` itself without a group.

    >>> import torch
    >>> group_all_reduce_sum(torch.ones(1)).item()
    1.0
    """
    with torch.no_grad():
        return group_all_reduce_sum_with_grad(x, group)


def group_all_reduce_sum_with_grad(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum over the group; the gradient of the sum is every addend's.

    >>> import torch
    >>> group_all_reduce_sum_with_grad(torch.ones(1)).item()
    1.0
    """
    group = group_of("group_all_reduce_sum", group)
    return x if group is None or group.size() <= 1 else _C.group_sum(local_part(x), group)


class _AllReduceSum:
    """group_all_reduce_sum_with_grad as a class with `apply`."""

    @staticmethod
    def apply(x: Tensor, group: ProcessGroup | None) -> Tensor:
        """Return the sum over the group."""
        return group_all_reduce_sum_with_grad(x, group)


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """Return [tokens / ranks, vocabulary] from [tokens, columns]. Differentiable.

    >>> import torch
    >>> all_to_all_vp2sq(torch.zeros(4, 8), None).shape
    torch.Size([4, 8])
    """
    logits, group, _ = vocab_part("all_to_all_vp2sq", vocab_parallel_logits, tp_group)
    return _C.to_token_shards(logits, group)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """Return [tokens, columns] from [tokens / ranks, vocabulary]: the way back of all_to_all_vp2sq.

    >>> import torch
    >>> all_to_all_sq2vp(torch.zeros(4, 8), None).shape
    torch.Size([4, 8])
    """
    group = group_of("all_to_all_sq2vp", tp_group)
    return _C.to_vocabulary_shards(local_part(seq_parallel_logits), group)
