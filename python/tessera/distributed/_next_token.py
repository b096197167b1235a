"""Log-probabilities of the next token: padded, packed and sharded sequences, from logits or hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

from tessera import _C, _vocab_ops
from tessera._tensors import group_of, is_part_of_mesh, local_part, vocab_part
from tessera.algorithms.logits_sampling_utils import need_top_k_or_top_p_filtering


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
    shift_targets: bool = True,
) -> Tensor:
    """Return log-probabilities of the next token, [batch, length - 1].

    Logits [batch, length, columns] may be longer than the tokens [batch, length]. With `cp_group` the
    logits are this rank's part of the sequence, [batch, length / ranks, columns], and tokens and result
    the whole; the ranks' gradients are added up. `sampling_params` (top_k, top_p) filters as a generator.
    Without `shift_targets` a place scores its own token, as diffusion models do: [batch, length].

    >>> import torch
    >>> tokens = torch.zeros(2, 5, dtype=torch.long)
    >>> from_parallel_logits_to_logprobs(torch.zeros(2, 5, 8), tokens, 0, 8).shape
    torch.Size([2, 4])
    """
    name = "from_parallel_logits_to_logprobs"
    logits, chosen, columns = vocab_part(
        name,
        vocab_parallel_logits,
        _one_group(name, group, tp_group),
        (vocab_start_index, vocab_end_index),
    )
    if torch.compiler.is_compiling() and cp_group is None:
        tokens = local_part(target)
        shift = 1 if shift_targets else 0
        top_k, top_p = _filters(sampling_params) or (None, 1.0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return _vocab_ops.filtered_log_probabilities(
                logits[:, : tokens.shape[1] - shift], tokens[:, shift:], columns, chosen, top_k, top_p
            )
    return _C.from_parallel_logits_to_logprobs(
        logits,
        local_part(target),
        *columns,
        chosen,
        inference_only,
        group_of(name, cp_group),
        _filters(sampling_params),
        shift_targets,
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
    name = "from_parallel_logits_to_logprobs_packed_sequences"
    logits, chosen, columns = vocab_part(
        name,
        vocab_parallel_logits,
        _one_group(name, group, tp_group),
        (vocab_start_index, vocab_end_index),
    )
    return _C.from_parallel_logits_to_logprobs_packed_sequences(
        logits,
        local_part(target),
        cu_seqlens_padded,
        unpacked_seqlen,
        *columns,
        group=chosen,
        inference_only=inference_only,
        cp_group=group_of(name, cp_group),
        sampling=_filters(sampling_params),
        target_is_pre_rolled=target_is_pre_rolled,
    )


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
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
    name = "from_parallel_hidden_states_to_logprobs"
    weight, group, columns = vocab_part(
        name, output_weight_layer, tp_group, (vocab_start_index, vocab_end_index), dim=0
    )
    return _C.from_parallel_hidden_states_to_logprobs(
        local_part(tensor_parallel_hidden_states),
        weight,
        local_part(target),
        *columns,
        group=group,
        inference_only=inference_only,
        cp_group=group_of(name, cp_group),
        chunk_size=chunk_size,
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
    *,
    shift_targets: bool = True,
) -> Tensor:
    """Return next-token log-probabilities, [batch, length - 1], of logits that are this rank's part.

    A target that is a DTensor over a mesh with an axis "cp" is sharded along the sequence; `seq_index`
    then says which place of the whole sequence each of its columns is. Without `shift_targets` a place
    scores its own token: [batch, length].

    >>> import torch
    >>> tokens = torch.zeros(2, 5, dtype=torch.long)
    >>> dtensor_from_parallel_logits_to_logprobs(torch.zeros(2, 5, 8), tokens, 0, 8, None).shape
    torch.Size([2, 4])
    """
    name = "dtensor_from_parallel_logits_to_logprobs"
    logits, group, columns = vocab_part(
        name, vocab_parallel_logits, tp_group, (vocab_start_index, vocab_end_index)
    )
    names = target.device_mesh.mesh_dim_names or () if is_part_of_mesh(target) else ()
    filters = _filters(sampling_params)
    if "cp" not in names or target.device_mesh.get_group("cp").size() == 1:
        whole = target.full_tensor() if is_part_of_mesh(target) else target
        return _C.from_parallel_logits_to_logprobs(
            logits, whole, *columns, group, inference_only, None, filters, shift_targets
        )
    if seq_index is None:
        raise ValueError(f"vocab.{name}: a target sharded over 'cp' needs seq_index.")
    mesh, placements = target.device_mesh, target.placements
    order = torch.argsort(seq_index)
    labels = target.full_tensor()[:, order]
    if shift_targets:
        labels = labels.roll(-1, -1)
        labels[:, -1] = -100  # nothing follows
    own = distribute_tensor(labels[:, seq_index], mesh, placements).to_local()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        if filters is None:
            values = _C.distributed_logprob(logits, own, *columns, group)
        else:
            values = _C.distributed_logprob_with_sampling(logits, own, group, *filters, columns)
    scores = DTensor.from_local(values, mesh, placements).full_tensor()[:, order]
    return scores[:, :-1] if shift_targets else scores


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: Tensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: Any | None = None,
) -> Tensor:
    """Return next-token log-probabilities of logits whose placement says how their vocabulary is cut."""
    if not is_part_of_mesh(vocab_parallel_logits):
        raise TypeError(
            "vocab.get_logprobs_from_vocab_parallel_logits: the logits are a "
            f"{type(vocab_parallel_logits).__name__}, not a DTensor. Use from_parallel_logits_to_logprobs."
        )
    return dtensor_from_parallel_logits_to_logprobs(
        vocab_parallel_logits,
        input_ids,
        0,
        vocab_parallel_logits.shape[-1],
        None,
        inference_only=not torch.is_grad_enabled(),
        seq_index=seq_index,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )


def get_next_token_logprobs_from_logits(
    input_ids: Tensor,
    next_token_logits: Tensor,
    seq_index: Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
    sampling_params: Any | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return log-probabilities of the next token, [batch, length - 1], however the logits are held.

    With `vocab_parallel_group` they are this rank's equal share of the columns; a DTensor says itself
    how it is cut; anything else is whole. `vocab_parallel_rank` must be the rank in the group.

    >>> import torch
    >>> tokens = torch.zeros(2, 5, dtype=torch.long)
    >>> get_next_token_logprobs_from_logits(tokens, torch.zeros(2, 5, 8)).shape
    torch.Size([2, 4])
    """
    name = "get_next_token_logprobs_from_logits"
    group = group_of(name, vocab_parallel_group)
    if group is None and is_part_of_mesh(next_token_logits):
        return get_logprobs_from_vocab_parallel_logits(
            next_token_logits, input_ids, seq_index, chunk_size, sampling_params
        )
    if group is not None and vocab_parallel_rank not in (None, group.rank()):
        raise ValueError(
            f"vocab.{name}: vocab_parallel_rank is {vocab_parallel_rank}, but this is rank {group.rank()} "
            "of the group."
        )
    share = next_token_logits.shape[-1]
    first = share * (0 if group is None else group.rank())
    return from_parallel_logits_to_logprobs(
        next_token_logits,
        local_part(input_ids).to(next_token_logits.device),
        first,
        first + share,
        group,
        cp_group=context_parallel_group,
        sampling_params=sampling_params,
    )


def get_cp_sharded_next_token_logprobs(
    logits: Tensor,
    input_ids: Tensor,
    cp_sharder: Any,
    *,
    chunk_size: int | None = None,
    sampling_params: Any | None = None,
) -> Tensor:
    """Return next-token log-probabilities, [batch, length - 1], of logits in a layout of the sequence.

    `logits` are this rank's part of the sequence, whole or a DTensor sharded by the vocabulary;
    `input_ids` [batch, length] the whole. `cp_sharder` owns the layout: `shard_token_tensor(tensor,
    seq_dim=, fill=)` gives this rank's part of a whole tensor, `gather_token_tensor(tensor, seq_dim=,
    trim=)` the whole from the parts, differentiably.
    """
    own, group, columns = vocab_part(
        "get_cp_sharded_next_token_logprobs", logits, None, (0, logits.shape[-1])
    )
    shifted = local_part(input_ids).roll(-1, 1)
    shifted[:, -1] = -100  # nothing follows
    labels = cp_sharder.shard_token_tensor(shifted, seq_dim=1, fill=-100)
    filters = _filters(sampling_params)
    if filters is None:
        values = _C.distributed_logprob(own, labels, *columns, group)
    else:
        values = _C.distributed_logprob_with_sampling(own, labels, group, *filters, columns)
    return cp_sharder.gather_token_tensor(values, seq_dim=1, trim=True)[:, :-1]
