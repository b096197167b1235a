"""Log-probabilities of the next token: padded, packed and sharded sequences, from logits or hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

from tessera import _C
from tessera.algorithms.logits_sampling_utils import need_top_k_or_top_p_filtering
from tessera.distributed._vocab_functions import DistributedLogprob, DistributedLogprobWithSampling


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
