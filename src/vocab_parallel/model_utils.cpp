#include "tessera/vocab_parallel/model_utils.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <ATen/Functions.h>

#include "core/autograd.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "tessera/regions/gather_scatter.h"
#include "tessera/vocab_parallel/context_parallel.h"
#include "tessera/vocab_parallel/linear.h"
#include "tessera/vocab_parallel/log_probabilities.h"
#include "tessera/vocab_parallel/sampling.h"
#include "tessera/vocab_parallel/solo_group.h"
#include "vocab_parallel/row_chunks.h"
#include "vocab_parallel/token_pass.h"

namespace tessera::vocab_parallel {
namespace {

TokenOptions options_for(const char* operation, std::int64_t start, std::int64_t end) {
  TokenOptions options;
  options.operation = operation;
  options.columns = Columns{start, end};
  return options;
}

int size_of(const std::optional<comm::Group>& group) { return group ? group->size() : 1; }

/// Log-probabilities of labels, filtered if the parameters say so.
at::Tensor label_log_probabilities(const at::Tensor& logits, const at::Tensor& labels,
                                   const comm::Group& group, const TokenOptions& options,
                                   const std::optional<TrainingSamplingParams>& sampling) {
  SamplingOptions filtered;
  static_cast<TokenOptions&>(filtered) = options;
  if (sampling) {
    filtered.top_k = std::max<std::int64_t>(sampling->top_k.value_or(0), 0);
    filtered.top_p = sampling->top_p;
  }
  // Wrong values are for the filter to name.
  const bool plain = filtered.top_k == 0 && filtered.top_p == 1.0;
  return plain ? log_probabilities(logits, labels, group, options)
               : sampled_log_probabilities(logits, labels, group, filtered);
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

/// The tokens moved `shift` places to the left; places behind the last get none.
at::Tensor shifted_tokens(const at::Tensor& tokens, std::int64_t shift, std::int64_t length,
                          std::int64_t ignored) {
  at::Tensor labels =
      at::full({tokens.size(0), length}, ignored, tokens.options().dtype(at::kLong));
  const std::int64_t count = tokens.size(1) - shift;
  if (count > 0) labels.narrow(1, 0, count).copy_(tokens.narrow(1, shift, count));
  return labels;
}

/// Starts on a CUDA device are not looked at.
void check_starts(const char* operation, const at::Tensor& starts, std::int64_t total) {
  if (!starts.is_cpu()) return;
  const auto place = starts.accessor<std::int64_t, 1>();
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < starts.numel(); ++i) {
    TESSERA_CHECK_VALUE(place[i] >= before && place[i] <= total && (i > 0 || place[i] == 0),
                        operation, ": sequence start ", i, " is ", place[i],
                        ". Starts begin with 0, do not fall, and end at most at ", total, ".");
    before = place[i];
  }
}

/// This context rank's part of ids [batch, length, k], filled up with ids that stand for none.
at::Tensor own_ids_padded(const char* operation, const at::Tensor& logits, const at::Tensor& ids,
                          const comm::Group& cp_group) {
  TESSERA_CHECK_VALUE(logits.dim() == 3 && ids.dim() == 3 && logits.size(0) == ids.size(0) &&
                          logits.size(1) * cp_group.size() >= ids.size(1),
                      operation, ": logits of shape ", logits.sizes(), " on ", cp_group.size(),
                      " context ranks do not fit ids of shape ", ids.sizes(),
                      ". Use [batch, length, columns] and [batch, length, k].");
  const std::int64_t missing = logits.size(1) * cp_group.size() - ids.size(1);
  const at::Tensor padded =
      missing == 0 ? ids
                   : at::constant_pad_nd(ids, std::vector<std::int64_t>{0, 0, 0, missing}, -100);
  return part_of_context_rank(padded, cp_group.rank(), cp_group.size(), 1);
}

}  // namespace

at::Tensor _compute_distributed_log_softmax(const at::Tensor& vocab_parallel_logits,
                                            const comm::Group& group) {
  const at::NoGradGuard no_grad;
  return log_softmax(vocab_parallel_logits, group);
}

at::Tensor _compute_distributed_log_softmax_with_grad(const at::Tensor& vocab_parallel_logits,
                                                      const comm::Group& group) {
  return log_softmax(vocab_parallel_logits, group);
}

at::Tensor _compute_distributed_softmax(const at::Tensor& vocab_parallel_logits,
                                        const comm::Group& group) {
  const at::NoGradGuard no_grad;
  if (vocab_parallel_logits.scalar_type() == at::kFloat) {
    return log_softmax(vocab_parallel_logits, group).exp_();
  }
  // A rounded logarithm would not do: its error grows with its size.
  return log_softmax(vocab_parallel_logits.to(at::kFloat), group)
      .exp_()
      .to(vocab_parallel_logits.scalar_type());
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

at::Tensor DistributedLogprobWithSampling::apply(const at::Tensor& vocab_parallel_logits,
                                                 const at::Tensor& target,
                                                 const comm::Group& tp_group,
                                                 std::optional<std::int64_t> top_k, double top_p,
                                                 bool inference_only,
                                                 const std::optional<Columns>& columns) {
  const GradIf mode(!inference_only);
  TokenOptions options;
  options.operation = "vocab.DistributedLogprobWithSampling";
  options.columns = columns;
  return label_log_probabilities(vocab_parallel_logits, target, tp_group, options,
                                 TrainingSamplingParams{top_k, top_p});
}

at::Tensor ChunkedDistributedLogprobWithSampling::apply(const at::Tensor& vocab_parallel_logits,
                                                        const at::Tensor& target,
                                                        const comm::Group& tp_group,
                                                        std::optional<std::int64_t> top_k,
                                                        double top_p, std::int64_t /*chunk_size*/,
                                                        bool inference_only) {
  return DistributedLogprobWithSampling::apply(vocab_parallel_logits, target, tp_group, top_k,
                                               top_p, inference_only);
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
                                            const comm::Group& tp_group, bool inference_only,
                                            const std::optional<Columns>& columns) {
  const GradIf mode(!inference_only);
  TokenOptions options;
  options.operation = "vocab.ChunkedDistributedEntropy";
  options.columns = columns;
  return token_scores(vocab_parallel_logits, {}, tp_group, {.entropy = true}, options)
      .entropy.neg();
}

at::Tensor DistributedCrossEntropy::apply(const at::Tensor& student_logits,
                                          const at::Tensor& target_logits, const comm::Group& group,
                                          bool inference_only,
                                          const std::optional<Columns>& columns) {
  const GradIf mode(!inference_only);
  TokenOptions options;
  options.operation = "vocab.DistributedCrossEntropy";
  options.columns = columns;
  return soft_cross_entropy(student_logits, target_logits, group, options);
}

at::Tensor from_parallel_logits_to_logprobs(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index, const comm::Group& group,
    bool inference_only, const std::optional<comm::Group>& cp_group,
    std::optional<std::int64_t> /*chunk_size*/,
    const std::optional<TrainingSamplingParams>& sampling_params, bool shift_targets) {
  constexpr const char* kOperation = "vocab.from_parallel_logits_to_logprobs";
  const int parts = size_of(cp_group);
  TESSERA_CHECK_VALUE(vocab_parallel_logits.dim() == 3 && target.dim() == 2 &&
                          vocab_parallel_logits.size(0) == target.size(0) &&
                          vocab_parallel_logits.size(1) * parts >= target.size(1) &&
                          target.size(1) >= 1,
                      kOperation, ": logits of shape ", vocab_parallel_logits.sizes(),
                      parts > 1 ? " on " + std::to_string(parts) + " context ranks" : std::string(),
                      " do not fit tokens of shape ", target.sizes(),
                      ". Use [batch, length, columns] and [batch, length].");
  const GradIf mode(!inference_only);
  const std::int64_t shift = shift_targets ? 1 : 0;
  const std::int64_t length = target.size(1) - shift;
  const TokenOptions options = options_for(kOperation, vocab_start_index, vocab_end_index);
  if (parts == 1) {
    return label_log_probabilities(vocab_parallel_logits.narrow(1, 0, length),
                                   target.narrow(1, shift, length), group, options,
                                   sampling_params);
  }
  const at::Tensor labels =
      shifted_tokens(target, shift, vocab_parallel_logits.size(1) * parts, options.ignore_index);
  const at::Tensor values = label_log_probabilities(
      vocab_parallel_logits, part_of_context_rank(labels, cp_group->rank(), parts, 1), group,
      options, sampling_params);
  return gather_context(values, *cp_group, 1).narrow(1, 0, length);
}

at::Tensor from_parallel_logits_to_logprobs_packed_sequences(
    const at::Tensor& vocab_parallel_logits, const at::Tensor& target,
    const at::Tensor& cu_seqlens_padded, std::int64_t unpacked_seqlen,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index, const comm::Group& group,
    bool inference_only, const std::optional<comm::Group>& cp_group,
    std::optional<std::int64_t> /*chunk_size*/,
    const std::optional<TrainingSamplingParams>& sampling_params, bool target_is_pre_rolled) {
  constexpr const char* kOperation = "vocab.from_parallel_logits_to_logprobs_packed_sequences";
  const int parts = size_of(cp_group);
  const std::int64_t target_parts = target_is_pre_rolled ? 1 : parts;
  TESSERA_CHECK_VALUE(vocab_parallel_logits.dim() == 3 && vocab_parallel_logits.size(0) == 1 &&
                          target.dim() == 2 && target.size(0) == 1 &&
                          target.size(1) == vocab_parallel_logits.size(1) * target_parts,
                      kOperation, ": logits of shape ", vocab_parallel_logits.sizes(),
                      " do not fit tokens of shape ", target.sizes(),
                      parts > 1 ? " on " + std::to_string(parts) + " context ranks" : std::string(),
                      ". Use [1, total, columns] and [1, total].");
  TESSERA_CHECK_VALUE(
      cu_seqlens_padded.dim() == 1 && cu_seqlens_padded.numel() >= 1 && unpacked_seqlen >= 1,
      kOperation, ": ", cu_seqlens_padded.numel(), " sequence starts and a length of ",
      unpacked_seqlen, " describe no packed sequences.");
  const GradIf mode(!inference_only);
  const std::int64_t total = vocab_parallel_logits.size(1) * parts;
  const at::Tensor starts = cu_seqlens_padded.to(target.device(), at::kLong).contiguous();
  check_starts(kOperation, starts, total);
  const std::int64_t num_sequences = starts.numel() - 1;
  constexpr std::int64_t kIgnored = -100;
  // For every packed place: its sequence, its place in it, and whether a next token follows.
  const at::Tensor place = at::arange(total, starts.options());
  const at::Tensor sequence =
      at::searchsorted(starts, place, /*out_int32=*/false, /*right=*/true) - 1;
  const at::Tensor within = place - starts.index_select(0, sequence.clamp(0, num_sequences));
  const at::Tensor end = starts.index_select(0, (sequence + 1).clamp(0, num_sequences));
  const at::Tensor is_used = (place + 1 < end).logical_and(within < unpacked_seqlen - 1);
  const auto own_part = [&](const at::Tensor& row) {
    return parts == 1 ? row : part_of_context_rank(row, cp_group->rank(), parts, 0, starts);
  };
  at::Tensor next = target.reshape(-1).to(at::kLong);
  if (!target_is_pre_rolled) next = own_part(next.roll(-1, 0));
  const at::Tensor labels =
      next.masked_fill(own_part(is_used).logical_not(), kIgnored).unsqueeze(0);
  at::Tensor values = label_log_probabilities(
      vocab_parallel_logits, labels, group,
      options_for(kOperation, vocab_start_index, vocab_end_index), sampling_params);
  if (parts > 1) values = gather_context(values, *cp_group, 1, starts);
  // Unused places are 0 and land on one spare element behind the result.
  const std::int64_t width = unpacked_seqlen - 1;
  const at::Tensor spot = at::where(is_used, sequence * width + within, num_sequences * width);
  return at::zeros({num_sequences * width + 1}, values.options())
      .index_add(0, spot, values.reshape(-1))
      .narrow(0, 0, num_sequences * width)
      .view({num_sequences, width});
}

namespace {

/// Log-probabilities of `labels` ([length, batch]) from hidden states sharded along the sequence.
at::Tensor hidden_log_probabilities(const char* operation, const at::Tensor& hidden,
                                    const at::Tensor& weight, const at::Tensor& labels,
                                    const Columns& range, const comm::Group& group,
                                    std::optional<std::int64_t> chunk_size) {
  TESSERA_CHECK_VALUE(hidden.dim() == 3 && hidden.size(0) * group.size() == labels.size(0) &&
                          hidden.size(1) == labels.size(1),
                      operation, ": hidden states of shape ", hidden.sizes(), " on ", group.size(),
                      " ranks do not fit tokens of shape [", labels.size(1), ", ", labels.size(0),
                      "]. Use [length / ranks, batch, features] and [batch, length].");
  TESSERA_CHECK_VALUE(chunk_size.value_or(1) > 0, operation, ": a chunk size of ",
                      chunk_size.value_or(1), " tokens is not possible.");
  const at::Tensor all = GatherSequence::apply(hidden, group);  // [length, batch, features]
  LinearOptions options;
  options.operation = operation;
  options.columns = range;
  options.reduction = Reduction::kNone;
  if (chunk_size) {
    // The same on all ranks, so it goes by the one with most columns.
    std::int64_t columns = weight.size(0);
    if (group.size() > 1) {
      columns = comm::all_reduce(at::full({1}, columns, labels.options().dtype(at::kLong)), group,
                                 comm::Reduction::kMax)
                    .item<std::int64_t>();
    }
    options.workspace_bytes = std::max<std::int64_t>(
        *chunk_size * labels.size(1) * columns * static_cast<std::int64_t>(weight.element_size()),
        1);
  }
  return linear_cross_entropy(all, weight, labels, group, options).neg();
}

}  // namespace

at::Tensor ChunkedDistributedHiddenStatesToLogprobs::apply(
    const at::Tensor& tensor_parallel_hidden_states, const at::Tensor& target,
    const at::Tensor& output_weight, std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    std::int64_t chunk_size, const comm::Group& tp_group, bool inference_only) {
  const GradIf mode(!inference_only);
  return hidden_log_probabilities("vocab.ChunkedDistributedHiddenStatesToLogprobs",
                                  tensor_parallel_hidden_states, output_weight, target.t(),
                                  {vocab_start_index, vocab_end_index}, tp_group, chunk_size)
      .t()
      .contiguous();
}

at::Tensor from_parallel_hidden_states_to_logprobs(
    const at::Tensor& tensor_parallel_hidden_states, const at::Tensor& output_weight,
    const at::Tensor& target, std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    const comm::Group& tp_group, bool inference_only, const std::optional<comm::Group>& cp_group,
    std::optional<std::int64_t> chunk_size) {
  constexpr const char* kOperation = "vocab.from_parallel_hidden_states_to_logprobs";
  const at::Tensor& hidden = tensor_parallel_hidden_states;
  const int parts = size_of(cp_group);
  const std::int64_t held = hidden.dim() == 3 ? hidden.size(0) * tp_group.size() * parts : -1;
  TESSERA_CHECK_VALUE(hidden.dim() == 3 && target.dim() == 2 && target.size(1) >= 1 &&
                          (parts > 1 ? held >= target.size(1) : held == target.size(1)) &&
                          hidden.size(1) == target.size(0),
                      kOperation, ": hidden states of shape ", hidden.sizes(), " on ",
                      tp_group.size() * parts, " ranks do not fit tokens of shape ", target.sizes(),
                      ". Use [length / ranks, batch, features] and [batch, length].");
  const GradIf mode(!inference_only);
  at::Tensor labels = shifted_tokens(target, 1, held, TokenOptions().ignore_index);
  if (parts > 1) labels = part_of_context_rank(labels, cp_group->rank(), parts, 1);
  at::Tensor values =
      hidden_log_probabilities(kOperation, hidden, output_weight, labels.t(),
                               {vocab_start_index, vocab_end_index}, tp_group, chunk_size)
          .t();
  if (parts > 1) values = gather_context(values, *cp_group, 1);
  return values.narrow(1, 0, target.size(1) - 1).contiguous();
}

std::pair<at::Tensor, at::Tensor> distributed_vocab_topk(
    const at::Tensor& vocab_parallel_logits, std::int64_t k, const comm::Group& tp_group,
    std::int64_t vocab_start_index, std::int64_t vocab_end_index,
    std::optional<std::int64_t> /*chunk_size*/) {
  return top_k(vocab_parallel_logits, k, tp_group,
               options_for("vocab.distributed_vocab_topk", vocab_start_index, vocab_end_index));
}

namespace {

/// Reads what `read` finds at `global_indices`, which are those of the whole sequence: the part of
/// this rank first, then those of all.
template <typename Read>
at::Tensor read_at_indices(const char* operation, const at::Tensor& logits,
                           const at::Tensor& global_indices, const comm::Group& tp_group,
                           const std::optional<comm::Group>& cp_group, std::int64_t start,
                           std::int64_t end, Read read) {
  const TokenOptions options = options_for(operation, start, end);
  if (size_of(cp_group) == 1) return read(logits, global_indices, tp_group, options);
  const at::Tensor ids = own_ids_padded(operation, logits, global_indices, *cp_group);
  return gather_context(read(logits, ids, tp_group, options), *cp_group, 1)
      .narrow(1, 0, global_indices.size(1));
}

}  // namespace

at::Tensor gather_logits_at_global_indices(const at::Tensor& vocab_parallel_logits,
                                           const at::Tensor& global_indices,
                                           const comm::Group& tp_group,
                                           const std::optional<comm::Group>& cp_group,
                                           std::int64_t vocab_start_index,
                                           std::int64_t vocab_end_index,
                                           std::optional<std::int64_t> /*chunk_size*/) {
  return read_at_indices("vocab.gather_logits_at_global_indices", vocab_parallel_logits,
                         global_indices, tp_group, cp_group, vocab_start_index, vocab_end_index,
                         logits_at);
}

at::Tensor gather_vocab_parallel_logprobs_at_indices(const at::Tensor& vocab_parallel_logits,
                                                     const at::Tensor& global_indices,
                                                     const comm::Group& tp_group,
                                                     const std::optional<comm::Group>& cp_group,
                                                     std::int64_t vocab_start_index,
                                                     std::int64_t vocab_end_index,
                                                     std::optional<std::int64_t> /*chunk_size*/) {
  return read_at_indices("vocab.gather_vocab_parallel_logprobs_at_indices", vocab_parallel_logits,
                         global_indices, tp_group, cp_group, vocab_start_index, vocab_end_index,
                         log_probabilities_at);
}

at::Tensor vocab_parallel_log_softmax(const at::Tensor& logits, double temperature,
                                      const comm::Group& tp_group) {
  TokenOptions options;
  options.operation = "vocab.vocab_parallel_log_softmax";
  options.temperature = temperature;
  return log_softmax(logits.to(at::kFloat), tp_group, options);
}

at::Tensor vocab_parallel_full_log_softmax(const at::Tensor& logits, double temperature,
                                           const comm::Group& tp_group) {
  const at::Tensor own = vocab_parallel_log_softmax(logits, temperature, tp_group);
  return tp_group.size() == 1 ? own : regions::gather(own, tp_group, -1);
}

at::Tensor vocab_parallel_gather_columns(const at::Tensor& logits, const at::Tensor& column_indices,
                                         const comm::Group& tp_group) {
  TESSERA_CHECK_VALUE(column_indices.dim() == 1,
                      "vocab.vocab_parallel_gather_columns: the ids have shape ",
                      column_indices.sizes(), ". Give one row, for all tokens.");
  auto shape = logits.sizes().vec();
  shape.back() = column_indices.size(0);
  TokenOptions options;
  options.operation = "vocab.vocab_parallel_gather_columns";
  return logits_at(logits, column_indices.expand(shape), tp_group, options);
}

at::Tensor vocab_parallel_argmax(const at::Tensor& logits, const comm::Group& tp_group) {
  const at::NoGradGuard no_grad;
  TokenOptions options;
  options.operation = "vocab.vocab_parallel_argmax";
  return token_scores(logits, {}, tp_group, {.argmax = true}, options).argmax;
}

DistillationLogprobs get_distillation_topk_logprobs_from_logits(
    const at::Tensor& student_logits, const at::Tensor& teacher_topk_logits,
    const at::Tensor& teacher_topk_indices, bool zero_outside_topk, bool calculate_entropy,
    const comm::Group& vocab_parallel_group,
    const std::optional<comm::Group>& context_parallel_group,
    const std::optional<Columns>& columns) {
  constexpr const char* kOperation = "vocab.get_distillation_topk_logprobs_from_logits";
  TESSERA_CHECK_VALUE(teacher_topk_indices.dim() == 3 && teacher_topk_indices.size(2) > 0 &&
                          teacher_topk_indices.sizes() == teacher_topk_logits.sizes(),
                      kOperation, ": ids of shape ", teacher_topk_indices.sizes(),
                      " and logits of shape ", teacher_topk_logits.sizes(),
                      " are no best ids of a teacher. Use [batch, length, k] with k above 0.");
  const at::Tensor ids = teacher_topk_indices.to(student_logits.device());
  const int parts = size_of(context_parallel_group);
  const std::int64_t length = ids.size(1) - 1;
  const std::int64_t held = student_logits.size(-1);
  const std::int64_t start = columns ? columns->start : vocab_parallel_group.rank() * held;
  const std::int64_t end = columns ? columns->end : start + held;
  const auto whole = [&](const at::Tensor& part) {
    return parts == 1 ? part : gather_context(part, *context_parallel_group, 1);
  };
  DistillationLogprobs result;
  if (zero_outside_topk) {
    const at::Tensor own_ids =
        parts == 1 ? ids : own_ids_padded(kOperation, student_logits, ids, *context_parallel_group);
    result.student = whole(log_probabilities_at(student_logits, own_ids, vocab_parallel_group,
                                                options_for(kOperation, start, end)));
    if (calculate_entropy) {
      result.minus_entropy =
          whole(ChunkedDistributedEntropy::apply(student_logits, 1, vocab_parallel_group,
                                                 /*inference_only=*/false, columns))
              .narrow(1, 0, length);
    }
  } else {
    result.student =
        at::log_softmax(gather_logits_at_global_indices(student_logits, ids, vocab_parallel_group,
                                                        context_parallel_group, start, end),
                        -1);
  }
  result.student = result.student.narrow(1, 0, length);
  result.teacher = at::log_softmax(teacher_topk_logits.to(student_logits.device(), at::kFloat), -1)
                       .narrow(1, 0, length);
  return result;
}

std::pair<at::Tensor, at::Tensor> apply_top_k_top_p(const at::Tensor& logits,
                                                    std::optional<std::int64_t> top_k,
                                                    double top_p) {
  SamplingOptions options;
  options.operation = "vocab.apply_top_k_top_p";
  options.top_k = std::max<std::int64_t>(top_k.value_or(0), 0);
  options.top_p = top_p;
  const at::Tensor smallest =
      smallest_kept_logit(logits, group_or_solo(std::nullopt), options).unsqueeze(-1);
  const at::Tensor keep = logits.detach() >= smallest;
  return {options.filters() ? logits.masked_fill(keep.logical_not(), -INFINITY) : logits, keep};
}

}  // namespace tessera::vocab_parallel
