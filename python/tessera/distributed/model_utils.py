"""The names of nemo_rl.distributed.model_utils, on Tessera's engine.

`vocab_start_index` and `vocab_end_index` are this rank's range of ids, `group` (newer name:
`tp_group`) the ranks that share the vocabulary. Everything is collective over it. With
`inference_only` results carry no gradient. `chunk_size` is accepted and has no effect where one pass
needs no temporary of the size of the logits. docs/deviations.md lists where numbers differ from the
reference because the reference's are wrong.
"""

from __future__ import annotations

from tessera.algorithms.logits_sampling_utils import TrainingSamplingParams, apply_top_k_top_p
from tessera.distributed._context_parallel import (  # noqa: F401 (the reference's private names)
    AllGatherCPTensor,
    _AllReduceSum,
    _get_tokens_on_this_cp_rank,
    all_to_all_sq2vp,
    all_to_all_vp2sq,
    allgather_cp_sharded_tensor,
    cp_load_balanced_to_contiguous,
    cp_shift_next,
    group_all_reduce_sum,
    group_all_reduce_sum_with_grad,
)
from tessera.distributed._megatron import patch_gpt_model_forward_for_linear_ce_fusion
from tessera.distributed._next_token import (
    dtensor_from_parallel_logits_to_logprobs,
    from_parallel_hidden_states_to_logprobs,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    get_cp_sharded_next_token_logprobs,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits,
)
from tessera.distributed._vocab_functions import (  # noqa: F401 (the reference's private names)
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedHiddenStatesToLogprobs,
    ChunkedDistributedLogprob,
    ChunkedDistributedLogprobWithSampling,
    DistributedCrossEntropy,
    DistributedLogprob,
    DistributedLogprobWithSampling,
    _compute_distributed_log_softmax,
    _compute_distributed_log_softmax_with_grad,
    _compute_distributed_softmax,
)
from tessera.distributed._vocab_reads import (
    distributed_vocab_topk,
    gather_logits_at_global_indices,
    gather_vocab_parallel_logprobs_at_indices,
    get_distillation_topk_logprobs_from_logits,
    vocab_parallel_argmax,
    vocab_parallel_full_log_softmax,
    vocab_parallel_gather_columns,
    vocab_parallel_log_softmax,
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
    "gather_vocab_parallel_logprobs_at_indices",
    "get_cp_sharded_next_token_logprobs",
    "get_distillation_topk_logprobs_from_logits",
    "get_logprobs_from_vocab_parallel_logits",
    "get_next_token_logprobs_from_logits",
    "group_all_reduce_sum",
    "group_all_reduce_sum_with_grad",
    "patch_gpt_model_forward_for_linear_ce_fusion",
    "vocab_parallel_argmax",
    "vocab_parallel_full_log_softmax",
    "vocab_parallel_gather_columns",
    "vocab_parallel_log_softmax",
]
