// tessera/vocab_parallel/sampling.h — log-probabilities under top-k and top-p filters.
//
// A generator that samples from the best ids only gives other probabilities than the plain softmax.
// These functions filter as it does, without bringing the vocabulary together: the smallest logit
// that is kept is found from small histograms that the ranks exchange.

#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/vocab_parallel/token_scores.h"

namespace tessera::vocab_parallel {

struct SamplingOptions : TokenOptions {
  /// Keep ids for which fewer than `top_k` others are greater; 0: all. Equal logits are kept or
  /// dropped together, so more than `top_k` can stay.
  std::int64_t top_k = 0;
  /// Of these, keep ids whose greater ones have less than `top_p` of the probability; 1: all. In
  /// (0, 1]. The best id always stays.
  double top_p = 1.0;

  bool filters() const noexcept { return top_k > 0 || top_p < 1.0; }
};

/// Returns the smallest logit that the filters keep, float32, one per token; -inf if nothing is
/// filtered.
///
/// Collective: 4 KB or 8 KB per token and rank and filter. Not differentiable. Throws ValueError
/// for a top_k below 0 and a top_p outside (0, 1]. `overwrite` and `reproducible_tile` do not
/// apply.
TESSERA_API at::Tensor smallest_kept_logit(const at::Tensor& local_logits, const comm::Group& group,
                                           const SamplingOptions& options);

/// Returns log p of each token's label under the softmax over the kept ids, float32.
///
/// A label that was filtered gives -inf and no gradient; the ignored one 0 and none. Ids that were
/// filtered get no gradient. Collective; differentiable once with respect to `local_logits`,
/// backward does not communicate. Throws as token_scores and smallest_kept_logit.
TESSERA_API at::Tensor sampled_log_probabilities(const at::Tensor& local_logits,
                                                 const at::Tensor& labels, const comm::Group& group,
                                                 const SamplingOptions& options);

}  // namespace tessera::vocab_parallel
