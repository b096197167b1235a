#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "support/error_text.h"
#include "vocab_parallel/linear_cases.h"

namespace tessera::vocab_parallel {
namespace {

using tessera::testing::cpu_worlds;
using tessera::testing::error_text;
using tessera::testing::run_ranks;
using tessera::testing::vocab_world_name;
using tessera::testing::VocabWorld;

INSTANTIATE_TEST_SUITE_P(Worlds, Linear, ::testing::ValuesIn(cpu_worlds()), vocab_world_name);
INSTANTIATE_TEST_SUITE_P(Processes, Linear,
                         ::testing::Values(VocabWorld{comm::Engine::kShm, 2, at::kCPU, true}),
                         vocab_world_name);

TEST(LinearErrors, WrongArgumentsAreNamed) {
  run_ranks(1, [](const comm::Group& group) {
    const at::Tensor hidden = at::zeros({2, 3});
    const at::Tensor weight = at::zeros({5, 3});
    const at::Tensor labels = at::tensor({0, 5}, at::kLong);
    EXPECT_EQ(
        error_text([&] { linear_cross_entropy(hidden, at::zeros({5, 4}), labels, group); }),
        "vocab.linear_cross_entropy: hidden states of shape [2, 3] do not fit a weight of shape "
        "[5, 4]. The last dimensions must be equal.");
    EXPECT_EQ(
        error_text([&] { linear_cross_entropy(hidden, weight.to(at::kHalf), labels, group); }),
        "vocab.linear_cross_entropy: the hidden states are Float, the weight is Half. Use one "
        "type.");
    EXPECT_EQ(error_text([&] { linear_cross_entropy(hidden, weight, labels, group); }),
              "vocab.linear_cross_entropy: label 5 at position [1] is outside the vocabulary of 5 "
              "ids. Use -100 where there is no label.");
    LinearOptions smoothed;
    smoothed.label_smoothing = -0.5;
    EXPECT_EQ(error_text([&] { linear_cross_entropy(hidden, weight, labels, group, smoothed); }),
              "vocab.linear_cross_entropy: a label smoothing of -0.5 is not possible. It lies "
              "between 0 and 1.");
    LinearOptions options;
    options.workspace_bytes = 0;
    EXPECT_EQ(error_text([&] { linear_cross_entropy(hidden, weight, labels, group, options); }),
              "vocab.linear_cross_entropy: a workspace of 0 bytes is not possible.");
  });
}

TEST(LinearErrors, IdsOutsideTheVocabularyAreNamed) {
  run_ranks(1, [](const comm::Group& group) {
    const at::Tensor logits = at::zeros({2, 7});
    EXPECT_EQ(error_text([&] {
                log_probabilities_at(logits, at::tensor({0, 1, 2, 9}, at::kLong).view({2, 2}),
                                     group);
              }),
              "vocab.log_probabilities_at: id 9 at position [1, 1] is outside the vocabulary of 7 "
              "ids. Use -100 where there is no id.");
    EXPECT_EQ(error_text([&] { top_k(logits, 8, group); }),
              "vocab.top_k: the best 8 ids were asked of a vocabulary of 7.");
    EXPECT_EQ(
        error_text([&] { logits_at(logits, at::tensor({0, -1}, at::kLong).view({2, 1}), group); }),
        "vocab.logits_at: id -1 at position [1, 0] is outside the vocabulary of 7 ids. Use -100 "
        "where there is no id.");
    EXPECT_EQ(error_text([&] { soft_cross_entropy(logits, at::zeros({3, 7}), group); }),
              "vocab.soft_cross_entropy: the logits have shape [2, 7], the target logits [3, 7]. "
              "They must be equal.");
  });
}

TEST(LinearErrors, IdsThatAreNotLookedAtGiveNan) {
  run_ranks(2, [](const comm::Group& group) {
    const at::Tensor logits = at::zeros({2, 4}).requires_grad_(true);
    const at::Tensor ids = at::tensor({7, 8, -100, -1}, at::kLong).view({2, 2});
    TokenOptions options;
    options.check_labels = false;
    const at::Tensor value = log_probabilities_at(logits, ids, group, options);
    EXPECT_NEAR(value[0][0].item<double>(), -std::log(8.0), 1e-6);
    EXPECT_TRUE(std::isnan(value[0][1].item<double>()));
    EXPECT_EQ(value[1][0].item<double>(), 0.0);
    EXPECT_TRUE(std::isnan(value[1][1].item<double>()));
    value[0][0].backward();
    const double own = group.rank() == 1 ? 1.0 : 0.0;  // id 7 is the last one of rank 1
    EXPECT_NEAR(logits.grad()[0][3].item<double>(), own - 0.125, 1e-6);
    EXPECT_EQ(logits.grad()[1].abs().max().item<double>(), 0.0);

    options.vocab_size = 7;  // an id of padding
    EXPECT_TRUE(std::isnan(log_probabilities_at(logits, ids, group, options)[0][0].item<double>()));
  });
}

// Without a pass over the logits nothing else would tell: the ids would be wrong.
TEST(LinearErrors, ColumnsThatDifferAreRefusedWhereOnlyIdsTravel) {
  const at::Tensor ids = at::zeros({2, 1}, at::kLong);
  const auto texts = [](const std::function<void(const at::Tensor&, const comm::Group&)>& body) {
    std::vector<std::string> all;
    for (const auto& error :
         tessera::testing::run_ranks_collecting(2, [&](const comm::Group& group) {
           body(at::zeros({2, group.rank() == 0 ? 7 : 6}), group);
         })) {
      all.push_back(tessera::testing::text_of(error));
    }
    return all;
  };
  const auto expected = [](const std::string& operation) {
    return std::vector<std::string>(2, operation +
                                           ": logits have 7 columns on rank 0 and 6 on rank 1. Pad "
                                           "the vocabulary, or pass the column ranges.");
  };
  EXPECT_EQ(texts([](const at::Tensor& x, const comm::Group& group) { top_k(x, 3, group); }),
            expected("vocab.top_k"));
  EXPECT_EQ(texts([&](const at::Tensor& x, const comm::Group& group) { logits_at(x, ids, group); }),
            expected("vocab.logits_at"));
  EXPECT_EQ(texts([&](const at::Tensor& x, const comm::Group& group) {
              sampled_log_probabilities(x, ids.squeeze(1), group, {});
            }),
            expected("vocab.sampled_log_probabilities"));
}

}  // namespace
}  // namespace tessera::vocab_parallel
