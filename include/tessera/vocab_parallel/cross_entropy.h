// tessera/vocab_parallel/cross_entropy.h — cross entropy of logits whose vocabulary is sharded.

#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/vocab_parallel/token_scores.h"

namespace tessera::vocab_parallel {

struct CrossEntropyOptions : TokenOptions {
  /// kMean divides by the number of labels that are not ignored, but at least by 1: if all are
  /// ignored, the loss is 0 and so is its gradient.
  Reduction reduction = Reduction::kMean;
  /// Weight of the uniform distribution over the whole vocabulary, 0 to 1.
  double label_smoothing = 0.0;
  /// Adds z_loss * log_sum_exp^2 to every token's loss.
  double z_loss = 0.0;
};

/// Returns the cross entropy of `labels` under softmax(logits), float32: a number, or with
/// Reduction::kNone one per token.
///
/// Equals F.cross_entropy on the gathered logits. Collective, differentiable, throws: as
/// token_scores. Upstream gradients may differ per token.
TESSERA_API at::Tensor cross_entropy(const at::Tensor& local_logits, const at::Tensor& labels,
                                     const comm::Group& group,
                                     const CrossEntropyOptions& options = {});

struct CrossEntropyScores {
  at::Tensor loss;
  TokenScores tokens;
};

/// The same, and the `wanted` scores of every token from the same pass.
TESSERA_API CrossEntropyScores cross_entropy_with_scores(const at::Tensor& local_logits,
                                                         const at::Tensor& labels,
                                                         const comm::Group& group,
                                                         const WantedScores& wanted,
                                                         const CrossEntropyOptions& options = {});

}  // namespace tessera::vocab_parallel
