// tessera/vocab_parallel/model_utils.h — the names of the reference page distributed.model_utils.
//
// Thin forms of token_scores.h, log_probabilities.h and linear.h for code that knows the reference.
// docs/deviations.md lists where the numbers differ because the reference's are wrong.
//
// In all of them `vocab_start_index` and `vocab_end_index` are this rank's range of ids, `group`
// the ranks that share the vocabulary, and everything is collective over it. With `inference_only`
// the result has no gradient. `chunk_size` is accepted and has no effect: one pass needs no
// temporary of the size of the logits.

#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::vocab_parallel {

/// Returns this rank's columns of log softmax, in the type of the logits. Not differentiable.
TESSERA_API at::Tensor _compute_distributed_log_softmax(const at::Tensor& vocab_parallel_logits,
                                                        const comm::Group& group);

/// Log-probabilities of `target` (already shifted), float32, shaped as it is.
struct TESSERA_API DistributedLogprob {
  static at::Tensor apply(const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
                          std::int64_t vocab_start_index, std::int64_t vocab_end_index,
                          const comm::Group& group, bool inference_only = false);
};

struct TESSERA_API ChunkedDistributedLogprob {
  static at::Tensor apply(const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
                          std::int64_t vocab_start_index, std::int64_t vocab_end_index,
                          std::int64_t chunk_size, const comm::Group& tp_group,
                          bool inference_only = false);
};

/// Log-probabilities at k ids per token, [..., k].
struct TESSERA_API ChunkedDistributedGatherLogprob {
  static at::Tensor apply(const at::Tensor& vocab_parallel_logits, const at::Tensor& global_indices,
                          std::int64_t vocab_start_index, std::int64_t vocab_end_index,
                          std::int64_t chunk_size, const comm::Group& tp_group,
                          bool inference_only = false);
};

/// Sum over the vocabulary of p log p, which is minus the entropy, as the reference defines it.
struct TESSERA_API ChunkedDistributedEntropy {
  static at::Tensor apply(const at::Tensor& vocab_parallel_logits, std::int64_t chunk_size,
                          const comm::Group& tp_group, bool inference_only = false);
};

/// Cross entropy with soft targets; the gradient goes to the student alone.
struct TESSERA_API DistributedCrossEntropy {
  static at::Tensor apply(const at::Tensor& student_logits, const at::Tensor& target_logits,
                          const comm::Group& group, bool inference_only = false);
};

/// Returns log-probabilities of the next token: [batch, length - 1] for logits [batch, length,
/// columns] and tokens [batch, length]. Logits may be longer than the tokens; the rest is left out.
/// Throws ValueError if they are shorter.
TESSERA_API at::Tensor from_parallel_logits_to_logprobs(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index, const comm::Group& group,
    bool inference_only = false, std::optional<std::int64_t> chunk_size = std::nullopt);

/// The same for sequences packed one after another: logits [1, total, columns], tokens [1, total],
/// `cu_seqlens_padded` the starts of the sequences and the end of the last (int32 or int64).
/// Returns [sequences, unpacked_seqlen - 1], 0 behind the end of a sequence; a longer one is cut
/// off. With `target_is_pre_rolled` the tokens already are the next ones.
TESSERA_API at::Tensor from_parallel_logits_to_logprobs_packed_sequences(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
    const at::Tensor& cu_seqlens_padded, std::int64_t unpacked_seqlen,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index, const comm::Group& group,
    bool inference_only = false, std::optional<std::int64_t> chunk_size = std::nullopt,
    bool target_is_pre_rolled = false);

/// Returns log-probabilities of the next token, [batch, length - 1], from hidden states sharded
/// along the sequence ([length / ranks, batch, features]) and a weight sharded by the vocabulary
/// ([columns, features]); `target` is [batch, length]. The gradient of the hidden states is summed
/// over the ranks and stays sharded.
TESSERA_API at::Tensor from_parallel_hidden_states_to_logprobs(
    const at::Tensor& tensor_parallel_hidden_states, const at::Tensor& output_weight,
    const at::Tensor& target, std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    const comm::Group& tp_group, bool inference_only = false,
    std::optional<std::int64_t> chunk_size = std::nullopt);

/// Returns the `k` largest logits of every token and their ids, [..., k]. No gradient.
TESSERA_API std::pair<at::Tensor, at::Tensor> distributed_vocab_topk(
    const at::Tensor& vocab_parallel_logits, std::int64_t k, const comm::Group& tp_group,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    std::optional<std::int64_t> chunk_size = std::nullopt);

/// Returns the logits at `global_indices`, [..., k], float32. Differentiable.
TESSERA_API at::Tensor gather_logits_at_global_indices(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& global_indices,
    const comm::Group& tp_group, std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    std::optional<std::int64_t> chunk_size = std::nullopt);

}  // namespace tessera::vocab_parallel
