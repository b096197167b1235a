// The cases of cross_entropy_cases.h on a GPU; two ranks share it, over Gloo.

#include <limits>

#include <ATen/Context.h>

#include "vocab_parallel/cross_entropy_cases.h"

namespace tessera::vocab_parallel {
namespace {

using tessera::testing::cuda_worlds;
using tessera::testing::run_ranks;
using tessera::testing::vocab_world_name;

INSTANTIATE_TEST_SUITE_P(Worlds, Vocab, ::testing::ValuesIn(cuda_worlds()), vocab_world_name);

TEST(VocabCuda, LabelOutsideTheVocabularyGivesNaNOrIsNamedOnRequest) {
  run_ranks(1, [](const comm::Group& group) {
    const at::Tensor logits = at::zeros({2, 16}, at::TensorOptions().device(at::kCUDA));
    const at::Tensor labels = at::tensor({3, 16}, at::kLong).to(at::kCUDA);
    CrossEntropyOptions options;
    options.reduction = Reduction::kNone;
    const at::Tensor loss = cross_entropy(logits, labels, group, options).cpu();
    EXPECT_NEAR(loss[0].item<double>(), std::log(16.0), 1e-6);
    EXPECT_TRUE(std::isnan(loss[1].item<double>()));
    options.check_labels = true;
    EXPECT_THROW(cross_entropy(logits, labels, group, options), c10::IndexError);
  });
}

TEST(VocabCuda, MoreThanTwoToThe31Elements) {
  run_ranks(1, [](const comm::Group& group) {
    const std::int64_t rows = 17000;
    const std::int64_t vocab = 128256;
    const auto options = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
    at::Tensor logits = at::zeros({rows, vocab}, options);
    logits.slice(0, rows - 1).fill_(1.0);
    logits[rows - 1][5] = 3.0;
    logits.requires_grad_(true);
    const at::Tensor labels = at::full({rows}, 5, at::kLong).to(at::kCUDA);
    CrossEntropyOptions loss_options;
    loss_options.reduction = Reduction::kNone;
    loss_options.overwrite = Overwrite::kInBackward;
    const at::Tensor loss = cross_entropy(logits, labels, group, loss_options);
    const double expected = std::log((vocab - 1) * std::exp(-2.0) + 1.0);
    EXPECT_NEAR(loss[rows - 1].item<double>(), expected, 1e-5);
    loss.sum().backward();
    EXPECT_NEAR(logits.grad()[rows - 1][5].item<double>(), std::exp(-expected) - 1.0, 4e-3);
    EXPECT_NEAR(logits.grad()[0][5].item<double>(), 1.0 / vocab - 1.0, 4e-3);
  });
}

// The kernels that read once and write once: rows that begin and end anywhere, labels in their
// first and last columns, rows in one block of any size and in clusters of up to eight.
void expect_right_gradient_in_forward(std::int64_t vocab, std::int64_t row_stride) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    run_ranks(1, [&](const comm::Group& group) {
      const auto options = at::TensorOptions().device(at::kCUDA);
      const std::int64_t rows = 700;
      at::manual_seed(static_cast<std::uint64_t>(vocab));
      // More columns than are read: neighbouring rows must stay as they are.
      at::Tensor held = (at::randn({rows, row_stride}, options) * 3).to(type);
      held.select(1, 0).slice(0, 0, rows, 5).fill_(-std::numeric_limits<float>::infinity());
      const at::Tensor before = held.clone();
      at::Tensor logits = held.slice(1, 0, vocab).detach().requires_grad_(true);
      at::Tensor labels = at::randint(vocab, {rows}, options.dtype(at::kLong));
      labels.slice(0, 1, rows, 7).fill_(0);
      labels.slice(0, 2, rows, 7).fill_(vocab - 1);
      labels.slice(0, 3, rows, 7).fill_(3);
      labels.slice(0, 4, rows, 7).fill_(vocab - 4);
      labels.slice(0, 5, rows, 70).fill_(-100);
      labels.masked_fill_((labels == 0).logical_and(held.select(1, 0).isinf()), 1);
      const at::Tensor plain =
          before.slice(1, 0, vocab).to(at::kFloat).detach().requires_grad_(true);
      const at::Tensor expected = at::cross_entropy_loss(plain, labels);
      expected.backward();

      CrossEntropyOptions loss_options;
      loss_options.overwrite = Overwrite::kInForward;
      const at::Tensor loss = cross_entropy(logits, labels, group, loss_options);
      loss.backward();
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5) << vocab;
      // Half a unit in the last place of the type, on a fast exponential; half denormals below.
      const double relative = type == at::kHalf ? 1.0 / 1024 : 1.0 / 128;
      EXPECT_TRUE(at::allclose(logits.grad().to(at::kFloat), plain.grad(), relative,
                               type == at::kHalf ? 6e-8 : 1e-12))
          << vocab << " " << type;
      EXPECT_TRUE(at::equal(held.slice(1, vocab), before.slice(1, vocab))) << vocab;
    });
  }
}

TEST(VocabCuda, GradientInForwardOfRowsThatBeginAnywhere) {
  for (const std::int64_t vocab : {255, 256, 257, 1003, 8199, 16383, 16393, 32775, 32776, 34561,
                                   50257, 69127, 138241, 270001}) {
    expect_right_gradient_in_forward(vocab, vocab + 1);
  }
}

TEST(VocabCuda, GradientInForwardOfRowsThatBeginAtPacks) {
  for (const std::int64_t vocab :
       {256, 261, 4096, 8192, 8200, 16384, 16390, 32000, 32768, 32776, 69120, 128256, 262144}) {
    expect_right_gradient_in_forward(vocab, (vocab / 8 + 1) * 8);
  }
}

// What is not a number makes its whole row so, in one pass as in two.
TEST(VocabCuda, GradientInForwardKeepsMissingNumbers) {
  for (const std::int64_t vocab : {300, 32000, 40000}) {
    run_ranks(1, [&](const comm::Group& group) {
      const auto options = at::TensorOptions().device(at::kCUDA);
      constexpr float kInfinity = std::numeric_limits<float>::infinity();
      at::manual_seed(5);
      const at::Tensor source = at::randn({6, vocab}, options).to(at::kBFloat16);
      source[1][vocab / 2] = std::numeric_limits<float>::quiet_NaN();
      source[2].fill_(-kInfinity);
      source[3][vocab - 1] = kInfinity;
      source[4].slice(0, 1).fill_(-kInfinity);
      const at::Tensor labels = at::zeros({6}, options.dtype(at::kLong));
      const auto gradient = [&](Overwrite overwrite) {
        const at::Tensor logits = source.clone().requires_grad_(true);
        CrossEntropyOptions loss_options;
        loss_options.overwrite = overwrite;
        loss_options.reduction = Reduction::kSum;
        cross_entropy(logits, labels, group, loss_options).backward();
        return logits.grad().to(at::kFloat);
      };
      const at::Tensor once = gradient(Overwrite::kInForward);
      EXPECT_TRUE(once.select(0, 1).isnan().all().item<bool>()) << vocab;
      EXPECT_TRUE(at::equal(once.select(0, 4), at::zeros({vocab}, options))) << vocab;
      EXPECT_TRUE(at::allclose(once, gradient(Overwrite::kNever), 1.0 / 128, 1e-9, true)) << vocab;
    });
  }
}

}  // namespace
}  // namespace tessera::vocab_parallel
