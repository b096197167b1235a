// tests/vocab_parallel/plain_scores.h — the same numbers from whole logits in double, by LibTorch.

#pragma once

#include <ATen/ATen.h>

#include "tessera/vocab_parallel/cross_entropy.h"

namespace tessera::testing {

struct PlainOptions {
  double label_smoothing = 0.0;
  double z_loss = 0.0;
  double temperature = 1.0;
  std::int64_t ignore_index = -100;
};

struct PlainScores {
  at::Tensor loss;  // per token
  at::Tensor log_probability;
  at::Tensor log_sum_exp;
  at::Tensor entropy;
};

/// `logits` are [..., vocabulary], any type; differentiable.
inline PlainScores plain_scores(const at::Tensor& logits, const at::Tensor& labels,
                                const PlainOptions& options = {}) {
  const at::Tensor x = logits.to(at::kDouble) / options.temperature;
  const at::Tensor log_p = at::log_softmax(x, -1);
  const at::Tensor ignored = labels == options.ignore_index;
  const at::Tensor safe = labels.masked_fill(ignored, 0).unsqueeze(-1);
  PlainScores scores;
  scores.log_sum_exp = at::logsumexp(x, {-1});
  scores.log_probability = log_p.gather(-1, safe).squeeze(-1).masked_fill(ignored, 0.0);
  scores.entropy = -(log_p.exp() * log_p.masked_fill(at::isinf(log_p), 0.0)).sum(-1);
  at::Tensor loss = -scores.log_probability * (1.0 - options.label_smoothing);
  if (options.label_smoothing != 0.0) loss = loss - options.label_smoothing * log_p.mean(-1);
  if (options.z_loss != 0.0) loss = loss + options.z_loss * scores.log_sum_exp.pow(2);
  scores.loss = loss.masked_fill(ignored, 0.0);
  return scores;
}

}  // namespace tessera::testing
