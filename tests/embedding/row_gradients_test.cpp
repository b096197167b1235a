// Gradients of rows that somebody else takes: sinks, and steps by gradients that are handed in.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "support/error_text.h"
#include "tessera/embedding/table_batch.h"

namespace tessera::embedding {
namespace {

using tessera::testing::error_text;

at::Tensor rows(std::int64_t count, std::int64_t columns, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn({count, columns}, generator, at::TensorOptions(at::kFloat));
}

LookupInput input_of(const std::vector<std::int64_t>& ids, std::vector<std::int64_t> offsets) {
  return {at::tensor(ids, at::kLong), at::tensor(offsets, at::kLong), {}, {}};
}

TEST(RowGradientSink, TakesWhatTheWeightsWouldGet) {
  const std::vector<Table> tables{{"a", rows(6, 3, 1).requires_grad_(true)},
                                  {"b", rows(4, 2, 2).requires_grad_(true)}};
  const std::vector<Feature> features{{"f", 0}, {"g", 1}};
  std::vector<std::vector<RowGradient>> taken;
  TableBatchOptions options;
  options.gradients = GradientForm::kSparse;
  const TableBatch plain(tables, features, options);
  options.sink = [&](std::vector<RowGradient> gradients) { taken.push_back(gradients); };
  const TableBatch sunk(tables, features, options);

  const LookupInput input = input_of({5, 1, 5, 0, 0}, {0, 2, 3, 5, 5});
  const at::Tensor gradient = rows(2, 5, 3);
  sunk.pooled(input).backward(gradient);
  EXPECT_FALSE(tables[0].weight.grad().defined());
  plain.pooled(input).backward(gradient);
  ASSERT_EQ(taken.size(), 1);
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const at::Tensor expected = tables[t].weight.grad().coalesce();
    EXPECT_TRUE(at::equal(taken[0][t].rows, expected.indices()[0]));
    EXPECT_TRUE(at::equal(taken[0][t].values, expected.values()));
  }
  // Also for nothing.
  sunk.pooled(input_of({}, {0, 0, 0, 0, 0})).sum().backward();
  ASSERT_EQ(taken.size(), 2);
  EXPECT_EQ(taken[1][0].rows.numel(), 0);
}

TEST(RowGradientSink, TakesSparseGradientsOnly) {
  TableBatchOptions options;
  options.gradients = GradientForm::kFused;
  options.sink = [](const std::vector<RowGradient>&) {};
  EXPECT_EQ(error_text([&] { TableBatch({{"a", rows(2, 2, 1)}}, {{"f", 0}}, options); }),
            "embedding.table_batch: a sink takes sparse gradients; ask for those.");
}

TEST(RowGradients, StepAsThoseOfTheWeights) {
  OptimizerOptions options;
  options.kind = OptimizerKind::kAdam;
  at::Tensor a = rows(6, 3, 1).requires_grad_(true);
  at::Tensor b = a.detach().clone().requires_grad_(true);
  RowOptimizer first({{"a", a}}, options);
  RowOptimizer second({{"a", b}}, options);
  for (int step = 0; step < 2; ++step) {
    const RowGradient gradient{at::tensor({1, 4}, at::kLong), rows(2, 3, step + 5)};
    a.mutable_grad() = at::sparse_coo_tensor(gradient.rows.unsqueeze(0), gradient.values, {6, 3});
    first.step();
    second.step_rows({gradient});
    EXPECT_TRUE(at::equal(a, b));
  }
  EXPECT_EQ(second.num_steps(), 2);
  EXPECT_EQ(error_text([&] { second.step_rows({}); }),
            "embedding.step_rows: there are 0 gradients for 1 tables.");
}

// Two parts of a table's columns step as the whole table, for every rule and both weight decays.
TEST(CutRows, StepAsWholeRows) {
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowWiseAdagrad,
        OptimizerKind::kAdam, OptimizerKind::kPartialRowWiseAdam, OptimizerKind::kLamb,
        OptimizerKind::kPartialRowWiseLamb, OptimizerKind::kLarsSgd}) {
    for (const auto mode : {WeightDecayMode::kL2, WeightDecayMode::kDecoupled}) {
      OptimizerOptions options;
      options.kind = kind;
      options.learning_rate = 0.1;
      options.weight_decay = 0.05;
      options.weight_decay_mode = mode;
      options.max_gradient = 1.5;
      const at::Tensor whole = rows(6, 5, 1);
      const at::Tensor left = whole.narrow(1, 0, 2).contiguous();
      const at::Tensor right = whole.narrow(1, 2, 3).contiguous();
      RowOptimizer one({{"whole", whole}}, options);
      RowOptimizer two({{"left", left}, {"right", right}}, options);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor touched = at::tensor({step, 4}, at::kLong);
        const at::Tensor gradient = rows(2, 5, 10 + step);
        one.step_rows({{touched, gradient}});
        two.step_cut_rows(
            {{touched, gradient.narrow(1, 0, 2)}, {touched, gradient.narrow(1, 2, 3)}}, {5, 5},
            [](std::vector<at::Tensor>& numbers) {
              numbers[0] = numbers[0] + numbers[1];
              numbers[1] = numbers[0];
            });
      }
      EXPECT_TRUE(at::allclose(at::cat({left, right}, 1), whole, 1e-5, 1e-6)) << name_of(kind);
      EXPECT_EQ(two.num_steps(), 3);
      const auto state = one.state_dict();
      const auto parts = two.state_dict();
      for (const std::string name : {".momentum1", ".momentum2"}) {
        const auto found = state.find("whole" + name);
        if (found == state.end()) continue;
        const at::Tensor a = parts.at("left" + name);
        const at::Tensor b = parts.at("right" + name);
        if (found->second.dim() == 2) {
          EXPECT_TRUE(at::allclose(at::cat({a, b}, 1), found->second, 1e-5, 1e-6));
        } else {
          EXPECT_TRUE(at::allclose(a, found->second, 1e-5, 1e-6));
          EXPECT_TRUE(at::equal(a, b));
        }
      }
    }
  }
}

TEST(CutRows, SayWhatTheyCannot) {
  const auto sum = [](std::vector<at::Tensor>&) {};
  OptimizerOptions options;
  options.kind = OptimizerKind::kRowWiseAdagrad;
  RowOptimizer optimizer({{"a", rows(2, 2, 1)}}, options);
  EXPECT_EQ(
      error_text([&] { optimizer.step_cut_rows({}, {4}, sum); }),
      "embedding.step_cut_rows: there are 0 gradients and 1 numbers of columns for 1 tables.");
  options.stochastic_rounding = true;
  RowOptimizer random({{"a", rows(2, 2, 1)}}, options);
  EXPECT_EQ(error_text([&] { random.step_cut_rows({{}}, {4}, sum); }),
            "embedding.step_cut_rows: rows that are cut cannot be rounded at random as whole ones "
            "are.");
}

}  // namespace
}  // namespace tessera::embedding
