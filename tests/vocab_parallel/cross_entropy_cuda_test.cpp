// The cases of cross_entropy_cases.h on a GPU; two ranks share it, over Gloo.

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

}  // namespace
}  // namespace tessera::vocab_parallel
