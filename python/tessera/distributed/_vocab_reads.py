"""What can be read out of logits whose columns are spread over ranks: best ids, chosen ids, all ids."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from tessera import _C
from tessera.distributed._context_parallel import local_part


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
    return _C.vocab_parallel_log_softmax(local_part(logits), temperature, tp_group)


def vocab_parallel_full_log_softmax(
    logits: Tensor, temperature: float, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return all columns of log softmax(logits / temperature), float32. Differentiable.

    >>> import torch
    >>> vocab_parallel_full_log_softmax(torch.zeros(1, 1, 8), 1.0).shape
    torch.Size([1, 1, 8])
    """
    return _C.vocab_parallel_full_log_softmax(local_part(logits), temperature, tp_group)


def vocab_parallel_gather_columns(
    logits: Tensor, column_indices: Tensor, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return the logits of every token at the same k ids, [..., k], float32. Differentiable.

    >>> import torch
    >>> vocab_parallel_gather_columns(torch.tensor([[[1.0, 3.0, 2.0]]]), torch.tensor([2, 0])).tolist()
    [[[2.0, 1.0]]]
    """
    return _C.vocab_parallel_gather_columns(local_part(logits), column_indices, tp_group)


def vocab_parallel_argmax(logits: Tensor, *, tp_group: ProcessGroup | None = None) -> Tensor:
    """Return the best id of every token. No gradient.

    >>> import torch
    >>> vocab_parallel_argmax(torch.tensor([[[1.0, 3.0, 2.0]]])).tolist()
    [[1]]
    """
    return _C.vocab_parallel_argmax(local_part(logits), tp_group)


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
        local_part(student_logits).float(),
        teacher_topk_logits,
        teacher_topk_indices,
        zero_outside_topk,
        calculate_entropy,
        group,
        cp_group,
    )
