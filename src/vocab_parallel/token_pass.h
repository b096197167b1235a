// src/vocab_parallel/token_pass.h — the forward and the backward pass over a rank's logits.

#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

#include "kernels/token_rows.h"
#include "tessera/comm/group.h"
#include "tessera/vocab_parallel/cross_entropy.h"

namespace tessera::vocab_parallel::detail {

/// Everything a pass needs besides tensors; checked and completed by `settings_of`.
struct PassSettings {
  std::string operation;
  Columns columns;  // of this rank; `num_valid` of them are not padding
  std::int64_t num_valid = 0;
  bool explicit_columns = false;
  std::int64_t vocab_size = 0;  // 0: known only after the exchange
  kernels::LossShape shape;
  Reduction reduction = Reduction::kNone;
  bool want_loss = false;
  WantedScores wanted;
  Overwrite overwrite = Overwrite::kNever;
  bool needs_gradient = false;
  bool has_labels = false;
  std::int64_t tile = 0;
  bool check_labels = false;
  std::uint64_t label_digest = 0;  // of labels that all ranks must have alike; 0: not compared

  bool has_extras() const { return wanted.log_sum_exp || wanted.entropy || wanted.argmax; }
};

/// What forward hands to backward, one value per row; and the results.
struct PassResult {
  at::Tensor maximum;
  at::Tensor sum;
  at::Tensor weighted;
  at::Tensor vocab;
  at::Tensor inverse;
  at::Tensor loss;  // reduced as the settings say
  TokenScores scores;
  bool gradient_is_written = false;  // over the logits
};

/// What stands in front of error texts: the caller's word, or `function`.
inline std::string operation_of(const TokenOptions& options, const char* function) {
  return options.operation.empty() ? function : options.operation;
}

/// Checks arguments that can be checked without talking to other ranks, for the public `function`.
PassSettings settings_of(const at::Tensor& logits, const at::Tensor& labels,
                         const comm::Group& group, const TokenOptions& options,
                         const char* function);

/// The labels as int64, one per row, contiguous; undefined if they are.
at::Tensor flat_labels(const at::Tensor& labels);

/// Reads the logits once, exchanges and merges. Collective.
PassResult forward_pass(const at::Tensor& logits, const at::Tensor& labels,
                        const comm::Group& group, const PassSettings& settings);

/// Logits that come some columns at a time.
struct PartsOfLogits {
  std::int64_t num_rows = 0;
  std::int64_t held = 0;       // columns of this rank, padding included
  std::int64_t columns = 1;    // of a part, the same on all ranks
  std::int64_t num_parts = 1;  // of the rank that has most
  /// Columns [first, last) of this rank, [rows, last - first]; valid until the next call.
  std::function<at::Tensor(std::int64_t first, std::int64_t last)> logits;
};

/// forward_pass of logits that need not exist as a whole. One exchange. Collective.
///
/// With Overwrite::kInForward a single part may be turned into its gradient; the result says so.
PassResult forward_pass_in_parts(const PartsOfLogits& parts, const at::TensorOptions& logit_options,
                                 const at::Tensor& labels, const comm::Group& group,
                                 const PassSettings& settings);

/// Gradients of the results, undefined where there is none; flat, except a reduced loss.
struct PassGradients {
  at::Tensor loss;
  at::Tensor log_probability;
  at::Tensor log_sum_exp;
  at::Tensor entropy;
};

/// Returns the gradient of the logits: a new tensor, or the logits themselves if `in_place`.
at::Tensor backward_pass(const at::Tensor& logits, const at::Tensor& labels,
                         const PassResult& saved, const PassGradients& gradients,
                         const PassSettings& settings, bool in_place);

/// Multiplies a gradient in place by the upstream gradient of a reduced loss, one number; undefined
/// is 0. The usual 1 costs no pass.
at::Tensor scale_gradient(at::Tensor gradient, const at::Tensor& upstream);

/// Stacks tensors of equal shape of all ranks, in rank order.
at::Tensor gather_rows(const at::Tensor& row, const comm::Group& group);

/// A number that equal labels have in common, for the exchange to compare; 0 if this rank is alone
/// or labels are not looked at. Waits for the device.
std::uint64_t digest_of(const at::Tensor& labels, const comm::Group& group,
                        const PassSettings& settings);

/// Throws ValueError if the ranges of the ranks, from `start` to `end`, are not the vocabulary.
void check_ends(std::int64_t start, std::int64_t end, const PassSettings& settings);

/// Returns the size of the vocabulary, for what does without a pass. Throws ValueError if the
/// ranges of the ranks do not join or their labels differ. Collective; waits for the device.
std::int64_t vocab_of_ranks(const at::Tensor& logits, const comm::Group& group,
                            const PassSettings& settings);

/// Fills in what the loss is made of. Throws ValueError for a smoothing outside [0, 1].
void set_loss(PassSettings& settings, const CrossEntropyOptions& options);

/// Note [When labels are checked]
///
/// Before anything is communicated if the size of the vocabulary is given, or this rank is alone.
/// Otherwise it is what the ranks say they hold, and known to all of them only after the exchange:
/// a rank that went by its own number of columns could throw while the others wait. Exactly one of
/// the two looks at the labels, and only if `settings.check_labels` is set. It throws IndexError
/// naming the first label outside the vocabulary, which the text calls `noun`, and waits for the
/// device.
void check_labels_before(const at::Tensor& labels, const PassSettings& settings,
                         const char* noun = "label");
void check_labels_after(const at::Tensor& labels, const at::Tensor& vocab,
                        const PassSettings& settings, const char* noun = "label");

/// Both, for what does without a pass; refuses ranges that do not join and labels that differ
/// between ranks as well. Collective.
void check_labels_without_pass(const at::Tensor& labels, const at::Tensor& logits,
                               const comm::Group& group, const PassSettings& settings,
                               const char* noun = "label");

}  // namespace tessera::vocab_parallel::detail
