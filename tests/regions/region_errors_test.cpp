#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/ranks.h"
#include "tessera/comm/error.h"
#include "tessera/regions/regions.h"

namespace tessera::regions {
namespace {

using comm::Engine;
using comm::Group;
using tessera::testing::run_ranks_collecting;
using tessera::testing::test_options;
using tessera::testing::text_of;

class RegionErrors : public ::testing::TestWithParam<Engine> {
 protected:
  // The texts of all ranks.
  std::vector<std::string> texts_of(int size, const std::function<void(const Group&)>& body) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::string> texts;
    for (const auto& error : run_ranks_collecting(size, body, test_options(GetParam()))) {
      texts.push_back(text_of(error));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    return texts;
  }
};

INSTANTIATE_TEST_SUITE_P(Engines, RegionErrors, ::testing::Values(Engine::kShm, Engine::kGloo),
                         [](const auto& info) {
                           return std::string(info.param == Engine::kShm ? "shm" : "gloo");
                         });

void expect_all(const std::vector<std::string>& texts, const std::string& expected) {
  for (std::size_t r = 0; r < texts.size(); ++r) EXPECT_EQ(texts[r], expected) << "rank " << r;
}

TEST_P(RegionErrors, ArgumentsThatAreWrongEverywhere) {
  const at::Tensor x = at::ones({4, 3});
  expect_all(texts_of(2, [](const Group& group) { reduce(at::Tensor(), group); }),
             "regions.reduce: the tensor is undefined.");
  expect_all(texts_of(1, [&](const Group& group) { gather(x, group, 2); }),
             "regions.gather: there is no dimension 2 in a tensor of 2 (-2 to 1).");
  expect_all(texts_of(2, [](const Group& group) { scatter(at::ones({}), group); }),
             "regions.scatter: a tensor without dimensions cannot be cut. Give it one, as with "
             "unsqueeze(0).");
  expect_all(texts_of(2, [&](const Group& group) { scatter(x, group, 0, Sizes{1, 2, 1}); }),
             "regions.scatter: 3 sizes were given for a group of 2.");
  expect_all(texts_of(2, [&](const Group& group) { scatter(x, group, 0, Sizes{5, -1}); }),
             "regions.scatter: rank 1 cannot have a slice of -1.");
  expect_all(texts_of(2, [&](const Group& group) { reduce_scatter(x, group, 1, Sizes{1, 1}); }),
             "regions.reduce_scatter: the sizes (1, 1) add up to 2, dimension 1 has 3.");
  expect_all(texts_of(1, [](const Group&) { even_sizes(-1, 2); }),
             "regions.even_sizes: -1 items cannot be cut into 2 parts.");
}

TEST_P(RegionErrors, ASliceThatIsNotWhatTheSizesSay) {
  expect_all(texts_of(3,
                      [](const Group& group) {
                        gather(at::ones({group.rank() == 1 ? 3 : 2, 2}), group, 0, Sizes{2, 2, 2});
                      }),
             "regions.gather: rank 1 holds 3 along dimension 0, the sizes say 2 (sizes 2, 2, 2). "
             "Give every rank the sizes of one partition.");
}

TEST_P(RegionErrors, RanksThatDisagreeOnTheDimension) {
  expect_all(
      texts_of(3, [](const Group& group) { gather(at::ones({2, 2}), group, group.rank() == 2); }),
      "regions.gather: rank 0 calls gather(Float [2, 2], dim 0), rank 2 calls gather(Float [2, "
      "2], dim 1) in group 'world'. All ranks make the same calls, in the same order, with the "
      "same arguments.");
}

TEST_P(RegionErrors, RanksThatDisagreeOnTheSizes) {
  expect_all(texts_of(2,
                      [](const Group& group) {
                        scatter(at::ones({4}), group, 0,
                                group.rank() == 0 ? Sizes{1, 3} : Sizes{2, 2});
                      }),
             "regions.scatter: rank 0 calls scatter(Float [4], dim 0, sizes 1, 3), rank 1 calls "
             "scatter(Float [4], dim 0, sizes 2, 2) in group 'world'. All ranks make the same "
             "calls, in the same order, with the same arguments.");
}

TEST_P(RegionErrors, RanksThatDisagreeOnShapeTypeOrOperator) {
  const auto tail = std::string(
      " in group 'world'. All ranks make the same calls, in the same order, with the same "
      "arguments.");
  expect_all(
      texts_of(2, [](const Group& group) { gather(at::ones({1, 2 + group.rank()}), group); }),
      "regions.gather: rank 0 calls gather(Float [1, 2], dim 0), rank 1 calls gather(Float "
      "[1, 3], dim 0)" +
          tail);
  expect_all(
      texts_of(2,
               [](const Group& group) {
                 reduce(at::ones({2}, group.rank() == 0 ? at::kFloat : at::kDouble), group);
               }),
      "regions.reduce: rank 0 calls reduce(Float [2]), rank 1 calls reduce(Double [2])" + tail);
  expect_all(texts_of(2,
                      [](const Group& group) {
                        const at::Tensor x = at::ones({2});
                        group.rank() == 0 ? reduce(x, group) : copy(x, group);
                      }),
             "regions.reduce: rank 0 calls reduce(Float [2]), rank 1 calls copy(Float [2])" + tail);
}

TEST_P(RegionErrors, AFaultOnOneRankReachesTheOthers) {
  const auto texts = texts_of(
      2, [](const Group& group) { gather(at::ones({2}), group, group.rank() == 1 ? 4 : 0); });
  const std::string fault = "regions.gather: there is no dimension 4 in a tensor of 1 (-1 to 0).";
  EXPECT_EQ(texts[1], fault);
  EXPECT_EQ(texts[0], fault + " (On rank 1, in group 'world'.)");
}

TEST_P(RegionErrors, ARankThatSkipsACallIsFoundWithinTheLimit) {
  auto options = test_options(GetParam());
  options.timeout = std::chrono::seconds(1);
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = run_ranks_collecting(
      2,
      [](const Group& group) {
        if (group.rank() == 1) {
          std::this_thread::sleep_for(std::chrono::seconds(2));
          return;
        }
        reduce(at::ones({2}), group);
      },
      options);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_NE(text_of(errors[0]).find("rank 1"), std::string::npos) << text_of(errors[0]);
}

}  // namespace
}  // namespace tessera::regions
