// tessera/vocab_parallel/linear.h — the last layer and its loss together, without the logits.
//
// Hidden states and a weight whose rows (the vocabulary) are sharded go in; loss, log-probability
// and entropy come out. The logits exist only as a workspace of a chosen size.

#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/vocab_parallel/cross_entropy.h"

namespace tessera::vocab_parallel {

struct LinearOptions : CrossEntropyOptions {
  /// Bytes of logits held at a time, at least one column. If all logits fit, they are kept for
  /// backward and nothing is computed twice; otherwise backward computes them again, part by part.
  /// Without it: all logits if they are no larger than the weight, else 256 MiB.
  std::optional<std::int64_t> workspace_bytes = std::nullopt;
  /// Added to the logits of this rank's ids, [columns]. Differentiable.
  std::optional<at::Tensor> local_bias = std::nullopt;
  /// If not 0, a logit x is softcap tanh(x / softcap). Backward then needs a float32 copy of a
  /// part.
  double softcap = 0.0;
};

/// Returns the cross entropy of `labels` under softmax(hidden weight^T), with bias and softcap if
/// the options say so.
///
/// `hidden` is [..., features] and the same on all ranks, `local_weight` [columns, features].
/// Tokens whose label is ignored are left out before the product (on CUDA only if
/// options.check_labels is set: finding them waits for the device). Upstream gradients may differ
/// per token. The gradient of the weight is summed in float32 and rounded once; that of `hidden` is
/// summed over the group while the weight's (in parts: the last part's) is computed. Collective,
/// also in backward. Overwrite and reproducible_tile do not apply.
TESSERA_API at::Tensor linear_cross_entropy(const at::Tensor& hidden,
                                            const at::Tensor& local_weight,
                                            const at::Tensor& labels, const comm::Group& group,
                                            const LinearOptions& options = {});

/// The same, and the `wanted` scores of every token (argmax, log-probability, ...) from the same
/// pass.
TESSERA_API CrossEntropyScores linear_cross_entropy_with_scores(
    const at::Tensor& hidden, const at::Tensor& local_weight, const at::Tensor& labels,
    const comm::Group& group, const WantedScores& wanted, const LinearOptions& options = {});

}  // namespace tessera::vocab_parallel
