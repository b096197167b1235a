#include "tessera/vocab_parallel/te_parallel_ce.h"

#include <algorithm>

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>

#include "tessera/core/check.h"
#include "tessera/vocab_parallel/cross_entropy.h"
#include "tessera/vocab_parallel/solo_group.h"

namespace tessera::vocab_parallel {
namespace {

Reduction reduction_named(const std::string& name) {
  TESSERA_CHECK_VALUE(name == "none" || name == "mean" || name == "sum",
                      "Invalid reduction: ", name, ". Use 'none', 'mean' or 'sum'.");
  return name == "none" ? Reduction::kNone : name == "mean" ? Reduction::kMean : Reduction::kSum;
}

/// The reference takes targets of any shape with one id per token.
at::Tensor shaped_like_tokens(const at::Tensor& target, const at::Tensor& input) {
  const auto shape = input.sizes().slice(0, input.dim() - 1);
  if (target.sizes() == shape || target.numel() != c10::multiply_integers(shape)) return target;
  return target.reshape(shape);
}

}  // namespace

at::Tensor parallel_cross_entropy(const at::Tensor& input, const at::Tensor& target,
                                  double label_smoothing, bool reduce_loss,
                                  const std::optional<comm::Group>& dist_process_group,
                                  std::int64_t ignore_idx, const std::optional<Columns>& columns) {
  CrossEntropyOptions options;
  options.columns = columns;
  options.operation = "vocab.parallel_cross_entropy";
  options.label_smoothing = label_smoothing;
  options.reduction = reduce_loss ? Reduction::kMean : Reduction::kNone;
  options.ignore_index = ignore_idx;
  return cross_entropy(input, shaped_like_tokens(target, input), group_or_solo(dist_process_group),
                       options);
}

at::Tensor CrossEntropyFunction::apply(const at::Tensor& input, const at::Tensor& target,
                                       double label_smoothing, bool reduce_loss,
                                       const std::optional<comm::Group>& dist_process_group,
                                       std::int64_t ignore_idx) {
  return parallel_cross_entropy(input, target, label_smoothing, reduce_loss, dist_process_group,
                                ignore_idx);
}

TEParallelCrossEntropy::TEParallelCrossEntropy(std::int64_t given_ignore_index,
                                               std::string given_reduction,
                                               std::optional<comm::Group> given_tp_group)
    : ignore_index(given_ignore_index),
      reduction(std::move(given_reduction)),
      tp_group(std::move(given_tp_group)) {}

at::Tensor TEParallelCrossEntropy::operator()(const at::Tensor& logits, const at::Tensor& labels,
                                              const at::Tensor& mask,
                                              std::optional<std::int64_t> num_label_tokens,
                                              const std::optional<Columns>& columns) const {
  CrossEntropyOptions options;
  options.columns = columns;
  options.operation = "vocab.TEParallelCrossEntropy";
  options.reduction = reduction_named(reduction);
  options.ignore_index = ignore_index;
  at::Tensor used = shaped_like_tokens(labels, logits);
  if (mask.defined()) {
    const at::Tensor is_left_out = shaped_like_tokens(mask.to(labels.device()), logits) == 0;
    TESSERA_CHECK_VALUE(at::is_expandable_to(is_left_out.sizes(), used.sizes()), options.operation,
                        ": a mask of shape ", mask.sizes(), " does not fit labels of shape ",
                        labels.sizes(), ".");
    used = used.masked_fill(is_left_out, ignore_index);
  }
  const at::Tensor loss = cross_entropy(logits, used, group_or_solo(tp_group), options);
  if (options.reduction != Reduction::kSum || !num_label_tokens) return loss;
  return loss / static_cast<double>(std::max<std::int64_t>(*num_label_tokens, 1));
}

}  // namespace tessera::vocab_parallel
