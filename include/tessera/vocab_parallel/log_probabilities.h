// tessera/vocab_parallel/log_probabilities.h — probabilities of chosen ids, of all ids, and the
// best.
//
// All of these are collective, take logits as token_scores does, and leave their inputs untouched.
// Unless options.check_labels is false (on CUDA the default), an id outside the vocabulary is an
// IndexError with its position.

#pragma once

#include <cstdint>
#include <utility>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/vocab_parallel/token_scores.h"

namespace tessera::vocab_parallel {

/// Returns log p of each token's label, float32. Differentiable; tokens with the ignored label give
/// 0.
TESSERA_API at::Tensor log_probabilities(const at::Tensor& local_logits, const at::Tensor& labels,
                                         const comm::Group& group,
                                         const TokenOptions& options = {});

/// Returns log p of `ids` ([..., k], global, the leading shape of the logits), float32 [..., k].
///
/// Differentiable; an id may occur several times. Ids equal to options.ignore_index give 0. Beside
/// the token statistics, 4 k bytes per token travel.
TESSERA_API at::Tensor log_probabilities_at(const at::Tensor& local_logits, const at::Tensor& ids,
                                            const comm::Group& group,
                                            const TokenOptions& options = {});

/// Returns the logits at `ids` as they are, float32 [..., k]; 0 for options.ignore_index.
/// Differentiable.
TESSERA_API at::Tensor logits_at(const at::Tensor& local_logits, const at::Tensor& ids,
                                 const comm::Group& group, const TokenOptions& options = {});

/// Returns this rank's columns of log softmax, in the type of the logits, computed in float32 and
/// rounded once; -inf for padding. Differentiable; backward adds up one number per token over the
/// group, so all ranks must take part in it.
TESSERA_API at::Tensor log_softmax(const at::Tensor& local_logits, const comm::Group& group,
                                   const TokenOptions& options = {});

/// Returns the `k` largest logits of every token and their global ids, largest first; float32 and
/// int64, [..., k]. Not differentiable. Throws ValueError if the vocabulary has fewer than `k` ids;
/// on CUDA without options.check_labels the places too many hold -inf and the id -1.
TESSERA_API std::pair<at::Tensor, at::Tensor> top_k(const at::Tensor& local_logits, std::int64_t k,
                                                    const comm::Group& group,
                                                    const TokenOptions& options = {});

/// Returns the cross entropy of softmax(local_target_logits) with softmax(local_logits) per token,
/// float32. Both have the same shape. Differentiable with respect to `local_logits` alone.
TESSERA_API at::Tensor soft_cross_entropy(const at::Tensor& local_logits,
                                          const at::Tensor& local_target_logits,
                                          const comm::Group& group,
                                          const TokenOptions& options = {});

}  // namespace tessera::vocab_parallel
