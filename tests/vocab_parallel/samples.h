// tests/vocab_parallel/samples.h — logits, labels and comparisons the vocabulary cases share.

#pragma once

#include <functional>
#include <string>

#include <torch/csrc/autograd/autograd.h>

#include "tessera/vocab_parallel/cross_entropy.h"
#include "vocab_parallel/plain_scores.h"
#include "vocab_parallel/vocab_fixture.h"

namespace tessera::vocab_parallel {

using tessera::testing::plain_scores;
using tessera::testing::PlainOptions;
using tessera::testing::shard_of;
using tessera::testing::Vocab;

inline constexpr std::int64_t kVocab = 1003;

inline at::Tensor whole_logits(at::IntArrayRef leading, at::ScalarType type = at::kFloat,
                               std::int64_t vocab = kVocab) {
  at::manual_seed(5);
  auto shape = leading.vec();
  shape.push_back(vocab);
  return (at::randn(shape) * 3.0).to(type);
}

inline at::Tensor some_labels(at::IntArrayRef leading, std::int64_t vocab = kVocab) {
  at::manual_seed(6);
  return at::randint(vocab, leading, at::kLong);
}

inline double tolerance_of(at::ScalarType type) {
  return type == at::kFloat ? 2e-6 : type == at::kHalf ? 1e-3 : 8e-3;
}

inline void expect_close(const at::Tensor& expected, const at::Tensor& actual, double relative,
                         double absolute, const std::string& what) {
  const at::Tensor a = expected.to(at::kCPU, at::kDouble);
  const at::Tensor b = actual.to(at::kCPU, at::kDouble);
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  EXPECT_TRUE(at::allclose(a, b, relative, absolute, /*equal_nan=*/true))
      << what << ": largest difference " << (a - b).abs().max().item<double>();
}

/// The gradient of `loss` with respect to `logits`, in double.
inline at::Tensor plain_gradient(const at::Tensor& whole,
                                 const std::function<at::Tensor(const at::Tensor&)>& loss) {
  const at::Tensor x = whole.to(at::kDouble).requires_grad_(true);
  return torch::autograd::grad({loss(x)}, {x})[0];
}

inline CrossEntropyOptions options_for(const Columns& columns,
                                       Reduction reduction = Reduction::kMean) {
  CrossEntropyOptions options;
  options.columns = columns;
  options.reduction = reduction;
  return options;
}

}  // namespace tessera::vocab_parallel
