#include "tessera/vocab_parallel/model_utils.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "tessera/vocab_parallel/linear.h"
#include "tessera/vocab_parallel/log_probabilities.h"
#include "vocab_parallel/row_chunks.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

TokenOptions options_for(const char* operation, std::int64_t start, std::int64_t end) {
  TokenOptions options;
  options.operation = operation;
  options.columns = Columns{start, end};
  return options;
}

/// Gradients only where they are asked for.
class GradIf {
 public:
  explicit GradIf(bool wanted) : mode_(wanted && at::GradMode::is_enabled()) {}

 private:
  at::AutoGradMode mode_;
};

/// Rows of all ranks, [length / ranks, ...] to [length, ...]. The whole is the same on all ranks
/// and its gradient arrives already summed, so each rank takes its own rows of it.
class GatherSequence : public torch::autograd::Function<GatherSequence> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const comm::Group& group) {
    context->saved_data["rank"] = static_cast<std::int64_t>(group.rank());
    context->saved_data["rows"] = rows.size(0);
    const at::Tensor all = detail::gather_rows(rows.detach().contiguous(), group);
    return all.flatten(0, 1);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::int64_t rows = context->saved_data["rows"].toInt();
    const std::int64_t first = context->saved_data["rank"].toInt() * rows;
    return {gradients[0].narrow(0, first, rows), at::Tensor()};
  }
};

/// The tokens moved one place to the left; the last place gets none.
at::Tensor next_tokens(const at::Tensor& tokens, std::int64_t length, std::int64_t ignored) {
  at::Tensor next = at::full({tokens.size(0), length}, ignored, tokens.options().dtype(at::kLong));
  const std::int64_t count = tokens.size(1) - 1;
  if (count > 0) next.narrow(1, 0, count).copy_(tokens.narrow(1, 1, count));
  return next;
}

}  // namespace

at::Tensor _compute_distributed_log_softmax(const at::Tensor& vocab_parallel_logits,
                                            const comm::Group& group) {
  return log_softmax(vocab_parallel_logits, group);
}

at::Tensor DistributedLogprob::apply(const at::Tensor& vocab_parallel_logits,
                                     const at::Tensor& target, std::int64_t vocab_start_index,
                                     std::int64_t vocab_end_index, const comm::Group& group,
                                     bool inference_only) {
  const GradIf mode(!inference_only);
  return log_probabilities(
      vocab_parallel_logits, target, group,
      options_for("vocab.DistributedLogprob", vocab_start_index, vocab_end_index));
}

at::Tensor ChunkedDistributedLogprob::apply(const at::Tensor& vocab_parallel_logits,
                                            const at::Tensor& target,
                                            std::int64_t vocab_start_index,
                                            std::int64_t vocab_end_index,
                                            std::int64_t /*chunk_size*/,
                                            const comm::Group& tp_group, bool inference_only) {
  return DistributedLogprob::apply(vocab_parallel_logits, target, vocab_start_index,
                                   vocab_end_index, tp_group, inference_only);
}

at::Tensor ChunkedDistributedGatherLogprob::apply(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& global_indices,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index, std::int64_t /*chunk_size*/,
    const comm::Group& tp_group, bool inference_only) {
  const GradIf mode(!inference_only);
  return log_probabilities_at(
      vocab_parallel_logits, global_indices, tp_group,
      options_for("vocab.ChunkedDistributedGatherLogprob", vocab_start_index, vocab_end_index));
}

at::Tensor ChunkedDistributedEntropy::apply(const at::Tensor& vocab_parallel_logits,
                                            std::int64_t /*chunk_size*/,
                                            const comm::Group& tp_group, bool inference_only) {
  const GradIf mode(!inference_only);
  TokenOptions options;
  options.operation = "vocab.ChunkedDistributedEntropy";
  return token_scores(vocab_parallel_logits, {}, tp_group, {.entropy = true}, options)
      .entropy.neg();
}

at::Tensor DistributedCrossEntropy::apply(const at::Tensor& student_logits,
                                          const at::Tensor& target_logits, const comm::Group& group,
                                          bool inference_only) {
  const GradIf mode(!inference_only);
  TokenOptions options;
  options.operation = "vocab.DistributedCrossEntropy";
  return soft_cross_entropy(student_logits, target_logits, group, options);
}

at::Tensor from_parallel_logits_to_logprobs(const at::Tensor& vocab_parallel_logits,
                                            const at::Tensor& target,
                                            std::int64_t vocab_start_index,
                                            std::int64_t vocab_end_index, const comm::Group& group,
                                            bool inference_only,
                                            std::optional<std::int64_t> /*chunk_size*/) {
  constexpr const char* kOperation = "vocab.from_parallel_logits_to_logprobs";
  TESSERA_CHECK_VALUE(vocab_parallel_logits.dim() == 3 && target.dim() == 2 &&
                          vocab_parallel_logits.size(0) == target.size(0) &&
                          vocab_parallel_logits.size(1) >= target.size(1) && target.size(1) >= 1,
                      kOperation, ": logits of shape ", vocab_parallel_logits.sizes(),
                      " do not fit tokens of shape ", target.sizes(),
                      ". Use [batch, length, columns] and [batch, length].");
  const GradIf mode(!inference_only);
  const std::int64_t length = target.size(1) - 1;
  const at::Tensor logits = vocab_parallel_logits.narrow(1, 0, length);
  return log_probabilities(logits, target.narrow(1, 1, length), group,
                           options_for(kOperation, vocab_start_index, vocab_end_index));
}

at::Tensor from_parallel_logits_to_logprobs_packed_sequences(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
    const at::Tensor& cu_seqlens_padded, std::int64_t unpacked_seqlen,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index, const comm::Group& group,
    bool inference_only, std::optional<std::int64_t> /*chunk_size*/, bool target_is_pre_rolled) {
  constexpr const char* kOperation = "vocab.from_parallel_logits_to_logprobs_packed_sequences";
  TESSERA_CHECK_VALUE(vocab_parallel_logits.dim() == 3 && vocab_parallel_logits.size(0) == 1 &&
                          target.sizes() == vocab_parallel_logits.sizes().slice(0, 2),
                      kOperation, ": logits of shape ", vocab_parallel_logits.sizes(),
                      " do not fit tokens of shape ", target.sizes(),
                      ". Use [1, total, columns] and [1, total].");
  TESSERA_CHECK_VALUE(
      cu_seqlens_padded.dim() == 1 && cu_seqlens_padded.numel() >= 1 && unpacked_seqlen >= 1,
      kOperation, ": ", cu_seqlens_padded.numel(), " sequence starts and a length of ",
      unpacked_seqlen, " describe no packed sequences.");
  const GradIf mode(!inference_only);
  const std::int64_t total = target.size(1);
  const at::Tensor starts = cu_seqlens_padded.to(target.device(), at::kLong).contiguous();
  const std::int64_t num_sequences = starts.numel() - 1;
  constexpr std::int64_t kIgnored = -100;
  // For every packed place: its sequence, its place in it, and whether a next token follows.
  const at::Tensor place = at::arange(total, starts.options());
  const at::Tensor sequence =
      at::searchsorted(starts, place, /*out_int32=*/false, /*right=*/true) - 1;
  const at::Tensor within = place - starts.index_select(0, sequence.clamp(0, num_sequences));
  const at::Tensor end = starts.index_select(0, (sequence + 1).clamp(0, num_sequences));
  const at::Tensor is_used = (place + 1 < end).logical_and(within < unpacked_seqlen - 1);
  at::Tensor next = target.reshape(-1).to(at::kLong);
  if (!target_is_pre_rolled) next = next.roll(-1, 0);
  const at::Tensor labels = next.masked_fill(is_used.logical_not(), kIgnored).unsqueeze(0);
  const at::Tensor values =
      log_probabilities(vocab_parallel_logits, labels, group,
                        options_for(kOperation, vocab_start_index, vocab_end_index));
  // Unused places are 0 and land on one spare element behind the result.
  const std::int64_t width = unpacked_seqlen - 1;
  const at::Tensor spot = at::where(is_used, sequence * width + within, num_sequences * width);
  return at::zeros({num_sequences * width + 1}, values.options())
      .index_add(0, spot, values.reshape(-1))
      .narrow(0, 0, num_sequences * width)
      .view({num_sequences, width});
}

at::Tensor from_parallel_hidden_states_to_logprobs(
    const at::Tensor& tensor_parallel_hidden_states, const at::Tensor& output_weight,
    const at::Tensor& target, std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    const comm::Group& tp_group, bool inference_only, std::optional<std::int64_t> chunk_size) {
  constexpr const char* kOperation = "vocab.from_parallel_hidden_states_to_logprobs";
  const at::Tensor& hidden = tensor_parallel_hidden_states;
  TESSERA_CHECK_VALUE(hidden.dim() == 3 && target.dim() == 2 &&
                          hidden.size(0) * tp_group.size() == target.size(1) &&
                          hidden.size(1) == target.size(0),
                      kOperation, ": hidden states of shape ", hidden.sizes(), " on ",
                      tp_group.size(), " ranks do not fit tokens of shape ", target.sizes(),
                      ". Use [length / ranks, batch, features] and [batch, length].");
  const GradIf mode(!inference_only);
  const at::Tensor all = GatherSequence::apply(hidden, tp_group);  // [length, batch, features]
  LinearOptions options;
  options.operation = kOperation;
  options.columns = Columns{vocab_start_index, vocab_end_index};
  options.reduction = Reduction::kNone;
  if (chunk_size) {
    options.workspace_bytes = *chunk_size * target.size(0) * output_weight.size(0) *
                              static_cast<std::int64_t>(output_weight.element_size());
  }
  const at::Tensor labels = next_tokens(target, target.size(1), options.ignore_index).t();
  const at::Tensor loss = linear_cross_entropy(all, output_weight, labels, tp_group, options);
  return loss.t().neg().narrow(1, 0, target.size(1) - 1).contiguous();
}

std::pair<at::Tensor, at::Tensor> distributed_vocab_topk(
    const at::Tensor& vocab_parallel_logits, std::int64_t k, const comm::Group& tp_group,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    std::optional<std::int64_t> /*chunk_size*/) {
  return top_k(vocab_parallel_logits, k, tp_group,
               options_for("vocab.distributed_vocab_topk", vocab_start_index, vocab_end_index));
}

at::Tensor gather_logits_at_global_indices(const at::Tensor& vocab_parallel_logits,
                                           const at::Tensor& global_indices,
                                           const comm::Group& tp_group,
                                           std::int64_t vocab_start_index,
                                           std::int64_t vocab_end_index,
                                           std::optional<std::int64_t> /*chunk_size*/) {
  return logits_at(
      vocab_parallel_logits, global_indices, tp_group,
      options_for("vocab.gather_logits_at_global_indices", vocab_start_index, vocab_end_index));
}

}  // namespace tessera::vocab_parallel
