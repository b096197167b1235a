// tessera/vocab_parallel/model_utils.h — the names of the reference page distributed.model_utils.
//
// Thin forms of token_scores.h, log_probabilities.h and linear.h for code that knows the reference.
// docs/deviations.md lists where the numbers differ because the reference's are wrong.
//
// In all of them `vocab_start_index` and `vocab_end_index` are this rank's range of ids, `group`
// the ranks that share the vocabulary, and everything is collective over it. With `inference_only`
// the result has no gradient. `chunk_size` is accepted and has no effect: one pass needs no
// temporary of the size of the logits.
//
// `columns`, where there is no other way to give it, is this rank's range of ids; without it all
// ranks hold equally many.
//
// `cp_group` are the ranks that share the sequences, cut as context_parallel.h says. Logits are
// this rank's part, tokens and ids the whole; the result is the whole, and its gradient is the sum
// of the ranks': divide a loss that all of them compute by their number.

#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/vocab_parallel/columns.h"

namespace tessera::vocab_parallel {

/// Filters of the generator that the probabilities are for. No top_k, or one below 1: all ids.
struct TrainingSamplingParams {
  std::optional<std::int64_t> top_k = std::nullopt;
  double top_p = 1.0;
};

/// Returns this rank's columns of log softmax, in the type of the logits. Not differentiable.
TESSERA_API at::Tensor _compute_distributed_log_softmax(const at::Tensor& vocab_parallel_logits,
                                                        const comm::Group& group);
/// The same, differentiable.
TESSERA_API at::Tensor _compute_distributed_log_softmax_with_grad(
    const at::Tensor& vocab_parallel_logits, const comm::Group& group);
/// Returns this rank's columns of the softmax, in the type of the logits. Not differentiable.
TESSERA_API at::Tensor _compute_distributed_softmax(const at::Tensor& vocab_parallel_logits,
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

/// Log-probabilities under top-k and top-p filters; -inf for a target that was filtered. The
/// vocabulary is never brought together, so any number of tokens will do.
struct TESSERA_API DistributedLogprobWithSampling {
  static at::Tensor apply(const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
                          const comm::Group& tp_group, std::optional<std::int64_t> top_k,
                          double top_p, bool inference_only = false,
                          const std::optional<Columns>& columns = std::nullopt);
};

struct TESSERA_API ChunkedDistributedLogprobWithSampling {
  static at::Tensor apply(const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
                          const comm::Group& tp_group, std::optional<std::int64_t> top_k,
                          double top_p, std::int64_t chunk_size, bool inference_only = false);
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
                          const comm::Group& tp_group, bool inference_only = false,
                          const std::optional<Columns>& columns = std::nullopt);
};

/// Cross entropy with soft targets; the gradient goes to the student alone.
struct TESSERA_API DistributedCrossEntropy {
  static at::Tensor apply(const at::Tensor& student_logits, const at::Tensor& target_logits,
                          const comm::Group& group, bool inference_only = false,
                          const std::optional<Columns>& columns = std::nullopt);
};

/// Log-probabilities of `target` ([batch, length], already shifted) from hidden states sharded
/// along the sequence and a weight sharded by the vocabulary; [batch, length].
struct TESSERA_API ChunkedDistributedHiddenStatesToLogprobs {
  static at::Tensor apply(const at::Tensor& tensor_parallel_hidden_states, const at::Tensor& target,
                          const at::Tensor& output_weight, std::int64_t vocab_start_index,
                          std::int64_t vocab_end_index, std::int64_t chunk_size,
                          const comm::Group& tp_group, bool inference_only = false);
};

/// Returns log-probabilities of the next token: [batch, length - 1] for logits [batch, length,
/// columns] and tokens [batch, length]. Logits (of all ranks of `cp_group` together) may be longer
/// than the tokens; the rest is left out. Throws ValueError if they are shorter. Without
/// `shift_targets` a place scores its own token, as diffusion models do: [batch, length].
TESSERA_API at::Tensor from_parallel_logits_to_logprobs(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index, const comm::Group& group,
    bool inference_only = false, const std::optional<comm::Group>& cp_group = std::nullopt,
    std::optional<std::int64_t> chunk_size = std::nullopt,
    const std::optional<TrainingSamplingParams>& sampling_params = std::nullopt,
    bool shift_targets = true);

/// The same for sequences packed one after another: logits [1, total, columns], tokens [1, total],
/// `cu_seqlens_padded` the starts of the sequences and the end of the last (int32 or int64).
/// Returns [sequences, unpacked_seqlen - 1], 0 behind the end of a sequence; a longer one is cut
/// off. With `target_is_pre_rolled` the tokens already are the next ones, and this rank's part.
TESSERA_API at::Tensor from_parallel_logits_to_logprobs_packed_sequences(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
    const at::Tensor& cu_seqlens_padded, std::int64_t unpacked_seqlen,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index, const comm::Group& group,
    bool inference_only = false, const std::optional<comm::Group>& cp_group = std::nullopt,
    std::optional<std::int64_t> chunk_size = std::nullopt,
    const std::optional<TrainingSamplingParams>& sampling_params = std::nullopt,
    bool target_is_pre_rolled = false);

/// Returns log-probabilities of the next token, [batch, length - 1], from hidden states sharded
/// along the sequence ([length / ranks, batch, features]) and a weight sharded by the vocabulary
/// ([columns, features]); `target` is [batch, length]. The gradient of the hidden states is summed
/// over the ranks and stays sharded.
TESSERA_API at::Tensor from_parallel_hidden_states_to_logprobs(
    const at::Tensor& tensor_parallel_hidden_states, const at::Tensor& output_weight,
    const at::Tensor& target, std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    const comm::Group& tp_group, bool inference_only = false,
    const std::optional<comm::Group>& cp_group = std::nullopt,
    std::optional<std::int64_t> chunk_size = std::nullopt);

/// Returns the `k` largest logits of every token and their ids, [..., k]. No gradient.
TESSERA_API std::pair<at::Tensor, at::Tensor> distributed_vocab_topk(
    const at::Tensor& vocab_parallel_logits, std::int64_t k, const comm::Group& tp_group,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    std::optional<std::int64_t> chunk_size = std::nullopt);

/// Returns the logits at `global_indices`, [..., k], float32. Differentiable.
TESSERA_API at::Tensor gather_logits_at_global_indices(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& global_indices,
    const comm::Group& tp_group, const std::optional<comm::Group>& cp_group,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    std::optional<std::int64_t> chunk_size = std::nullopt);

/// Returns the log-probabilities at `global_indices`, [..., k], float32, normalised over the whole
/// vocabulary. Differentiable.
TESSERA_API at::Tensor gather_vocab_parallel_logprobs_at_indices(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& global_indices,
    const comm::Group& tp_group, const std::optional<comm::Group>& cp_group,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    std::optional<std::int64_t> chunk_size = std::nullopt);

/// Returns log softmax(logits / temperature), float32: this rank's columns, or all of them. Ranks
/// hold equally many columns. Differentiable.
TESSERA_API at::Tensor vocab_parallel_log_softmax(const at::Tensor& logits, double temperature,
                                                  const comm::Group& tp_group);
TESSERA_API at::Tensor vocab_parallel_full_log_softmax(const at::Tensor& logits, double temperature,
                                                       const comm::Group& tp_group);
/// Returns the logits at the ids `column_indices` ([k]) of every token, [..., k], float32.
/// Differentiable.
TESSERA_API at::Tensor vocab_parallel_gather_columns(const at::Tensor& logits,
                                                     const at::Tensor& column_indices,
                                                     const comm::Group& tp_group);
/// Returns the best id of every token.
TESSERA_API at::Tensor vocab_parallel_argmax(const at::Tensor& logits, const comm::Group& tp_group);

/// Next-token log-probabilities of the teacher's best ids, [batch, length - 1, k], and the sum of
/// p log p over the vocabulary, [batch, length - 1], if it was asked for.
struct DistillationLogprobs {
  at::Tensor student;
  at::Tensor teacher;
  at::Tensor minus_entropy;
};

/// Returns the log-probabilities of student and teacher at the teacher's best ids. With
/// `zero_outside_topk` the student's are those of the whole vocabulary, and `calculate_entropy`
/// applies; otherwise both are normalised over these ids alone. Throws ValueError without ids.
TESSERA_API DistillationLogprobs get_distillation_topk_logprobs_from_logits(
    const at::Tensor& student_logits, const at::Tensor& teacher_topk_logits,
    const at::Tensor& teacher_topk_indices, bool zero_outside_topk, bool calculate_entropy,
    const comm::Group& vocab_parallel_group,
    const std::optional<comm::Group>& context_parallel_group = std::nullopt,
    const std::optional<Columns>& columns = std::nullopt);

/// Returns the logits with those that the filters drop at -inf, and where they were kept, for rows
/// that are whole. The gradient goes to what was kept.
TESSERA_API std::pair<at::Tensor, at::Tensor> apply_top_k_top_p(const at::Tensor& logits,
                                                                std::optional<std::int64_t> top_k,
                                                                double top_p);

}  // namespace tessera::vocab_parallel
