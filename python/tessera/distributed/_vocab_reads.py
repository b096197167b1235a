"""What can be read out of logits whose columns are spread over ranks: best ids, chosen ids, all ids."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C, regions
from tessera._tensors import group_of, is_part_of_mesh, local_part, vocab_part


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
    logits, group, columns = vocab_part(
        "distributed_vocab_topk", vocab_parallel_logits, tp_group, (vocab_start_index, vocab_end_index)
    )
    return _C.distributed_vocab_topk(logits, k, group, *columns)


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
    name = "gather_logits_at_global_indices"
    logits, group, columns = vocab_part(
        name, vocab_parallel_logits, tp_group, (vocab_start_index, vocab_end_index)
    )
    return _C.gather_logits_at_global_indices(
        logits, local_part(global_indices), group, group_of(name, cp_group), *columns
    )


def gather_vocab_parallel_logprobs_at_indices(
    vocab_parallel_logits: Tensor,
    global_indices: Tensor,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> Tensor:
    """Return log p at `global_indices`, [..., k], float32, over the whole vocabulary. Differentiable.

    >>> import torch
    >>> ids = torch.tensor([[[2, 0]]])
    >>> round(
    ...     float(
    ...         gather_vocab_parallel_logprobs_at_indices(
    ...             torch.zeros(1, 1, 8), ids, vocab_start_index=0, vocab_end_index=8
    ...         )[0, 0, 0]
    ...     ),
    ...     4,
    ... )
    -2.0794
    """
    name = "gather_vocab_parallel_logprobs_at_indices"
    logits, group, columns = vocab_part(
        name, vocab_parallel_logits, tp_group, (vocab_start_index, vocab_end_index)
    )
    return _C.gather_vocab_parallel_logprobs_at_indices(
        logits, local_part(global_indices), group, group_of(name, cp_group), *columns
    )


def vocab_parallel_log_softmax(
    logits: Tensor, temperature: float, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return this rank's columns of log softmax(logits / temperature), float32. Differentiable.

    >>> import torch
    >>> round(float(vocab_parallel_log_softmax(torch.zeros(1, 1, 8), 2.0)[0, 0, 0]), 4)
    -2.0794
    """
    own, group, columns = vocab_part("vocab_parallel_log_softmax", logits, tp_group)
    if columns is None:
        return _C.vocab_parallel_log_softmax(own, temperature, group)
    return _C.vocab_log_softmax(own.float(), group, _C.TokenOptions(columns=columns, temperature=temperature))


def vocab_parallel_full_log_softmax(
    logits: Tensor, temperature: float, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return all columns of log softmax(logits / temperature), float32. Differentiable.

    >>> import torch
    >>> vocab_parallel_full_log_softmax(torch.zeros(1, 1, 8), 1.0).shape
    torch.Size([1, 1, 8])
    """
    own, group, columns = vocab_part("vocab_parallel_full_log_softmax", logits, tp_group)
    if columns is None:
        return _C.vocab_parallel_full_log_softmax(own, temperature, group)
    part = _C.vocab_log_softmax(own.float(), group, _C.TokenOptions(columns=columns, temperature=temperature))
    return part if group is None else regions.gather(part, group, -1)


def vocab_parallel_gather_columns(
    logits: Tensor, column_indices: Tensor, *, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return the logits of every token at the same k ids, [..., k], float32. Differentiable.

    >>> import torch
    >>> vocab_parallel_gather_columns(torch.tensor([[[1.0, 3.0, 2.0]]]), torch.tensor([2, 0])).tolist()
    [[[2.0, 1.0]]]
    """
    own, group, columns = vocab_part("vocab_parallel_gather_columns", logits, tp_group)
    if columns is None:
        return _C.vocab_parallel_gather_columns(own, column_indices, group)
    ids = column_indices.expand(*own.shape[:-1], -1)
    return _C.vocab_logits_at(own, ids, group, _C.TokenOptions(columns=columns))


def vocab_parallel_argmax(logits: Tensor, *, tp_group: ProcessGroup | None = None) -> Tensor:
    """Return the best id of every token. No gradient.

    >>> import torch
    >>> vocab_parallel_argmax(torch.tensor([[[1.0, 3.0, 2.0]]])).tolist()
    [[1]]
    """
    own, group, columns = vocab_part("vocab_parallel_argmax", logits, tp_group)
    if columns is None:
        return _C.vocab_parallel_argmax(own, group)
    with torch.no_grad():
        wanted = [False, False, False, True]
        return _C.vocab_token_scores(own, None, group, wanted, _C.TokenOptions(columns=columns))[4]


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
    name = "get_distillation_topk_logprobs_from_logits"
    cp_group = group_of(name, context_parallel_group)
    if vocab_parallel_group is None and is_part_of_mesh(student_logits):
        names = student_logits.device_mesh.mesh_dim_names or ()
        cp_group = student_logits.device_mesh.get_group("cp") if "cp" in names else None
    student, group, columns = vocab_part(name, student_logits, vocab_parallel_group)
    if group is not None and vocab_parallel_rank not in (None, group.rank()):
        raise ValueError(
            f"vocab.{name}: vocab_parallel_rank is {vocab_parallel_rank}, but this is rank {group.rank()} "
            "of the group."
        )
    return _C.distillation_topk_logprobs(
        student.float(),
        local_part(teacher_topk_logits),
        local_part(teacher_topk_indices),
        zero_outside_topk=zero_outside_topk,
        calculate_entropy=calculate_entropy,
        group=group,
        cp_group=cp_group,
        columns=columns,
    )
