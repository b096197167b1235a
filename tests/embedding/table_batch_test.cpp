// A batch of tables as its users see it: values, gradients and errors. LibTorch's own embedding_bag
// and index_add are the judges. For its steps see table_steps_test.cpp.

#include <ATen/core/grad_mode.h>

#include "embedding/table_batches.h"
#include "support/error_text.h"

namespace tessera::embedding {
namespace {

using at::Tensor;
using tessera::testing::error_text;
using tessera::testing::expect_close;
using tessera::testing::Fixture;
using tessera::testing::longs;
using tessera::testing::Threads;

TEST(TableBatch, PoolsAsLibTorchDoes) {
  for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const Fixture fixture({}, type);
    for (const auto id_type : {at::kLong, at::kInt}) {
      for (const bool is_weighted : {false, true}) {
        for (const std::int64_t size : {0, 1, 3, 200}) {
          const LookupInput input = fixture.input(size, is_weighted, id_type);
          const Tensor found = fixture.batch->pooled(input);
          EXPECT_EQ(found.scalar_type(), at::kFloat);
          expect_close(found, fixture.judge(input));
          Tensor output = at::full_like(found, -7).detach();
          fixture.batch->pooled_out(input, output);
          EXPECT_TRUE(output.equal(found));
        }
      }
    }
    const LookupInput uneven = fixture.input(0, true, at::kLong, {5, 0, 130, 1});
    expect_close(fixture.batch->pooled(uneven), fixture.judge(uneven));
  }
}

TEST(TableBatch, SequenceGivesTheRowsThemselves) {
  const Fixture fixture;
  const LookupInput input = fixture.input(6, true);
  const Tensor found = fixture.batch->sequence(input);
  std::vector<Tensor> wanted;
  const auto* offset = input.offsets.const_data_ptr<std::int64_t>();
  for (int f = 0; f < 4; ++f) {
    const Tensor ids = input.ids.slice(0, offset[f * 6], offset[f * 6 + 6]);
    const Tensor weights = input.weights.slice(0, offset[f * 6], offset[f * 6 + 6]);
    const Table& table = fixture.tables[fixture.features[f].table];
    wanted.push_back((table.weight.index_select(0, ids) * weights.unsqueeze(1)).reshape({-1}));
  }
  EXPECT_TRUE(found.equal(at::cat(wanted)));
}

TEST(TableBatch, GradientsAreLibTorchs) {
  for (const auto form : {GradientForm::kDense, GradientForm::kSparse}) {
    for (const bool is_weighted : {false, true}) {
      for (const int threads : {1, 3}) {
        const Threads guard(threads);
        Fixture fixture({.gradients = form});
        LookupInput input = fixture.input(200, is_weighted);
        if (is_weighted) input.weights.requires_grad_(true);
        // A gradient that comes as a slice: rows further apart than they are long.
        const Tensor grad = at::rand({200, 150}).slice(1, 20, 121);
        std::vector<Tensor> inputs;
        for (const Table& table : fixture.tables) inputs.push_back(table.weight);
        if (is_weighted) inputs.push_back(input.weights);
        const Tensor wanted_output = fixture.judge(input);
        wanted_output.backward(grad.to(at::kDouble));
        std::vector<Tensor> wanted;
        for (Tensor& tensor : inputs) {
          wanted.push_back(tensor.grad().clone());
          tensor.mutable_grad() = Tensor();
        }
        fixture.batch->pooled(input).backward(grad);
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          const Tensor found = inputs[i].grad();
          if (i < 3) {
            EXPECT_EQ(found.is_sparse(), form == GradientForm::kSparse);
          }
          expect_close(found.is_sparse() ? found.to_dense() : found, wanted[i]);
        }
      }
    }
  }
}

TEST(TableBatch, SequenceGradientsAreLibTorchs) {
  Fixture fixture({.gradients = GradientForm::kSparse});
  LookupInput input = fixture.input(50, true);
  input.weights.requires_grad_(true);
  const Tensor output = fixture.batch->sequence(input);
  const Tensor grad = at::rand_like(output);
  output.backward(grad);
  const auto* offset = input.offsets.const_data_ptr<std::int64_t>();
  std::int64_t place = 0;
  std::vector<Tensor> wanted;
  for (const Table& table : fixture.tables) wanted.push_back(at::zeros_like(table.weight));
  std::vector<Tensor> of_weights;
  for (int f = 0; f < 4; ++f) {
    const auto table = static_cast<std::size_t>(fixture.features[f].table);
    const Tensor weight = fixture.tables[table].weight.detach();
    const Tensor ids = input.ids.slice(0, offset[f * 50], offset[f * 50 + 50]);
    const std::int64_t count = ids.numel() * weight.size(1);
    const Tensor rows = grad.slice(0, place, place + count).view({-1, weight.size(1)});
    const Tensor factors = input.weights.detach().slice(0, offset[f * 50], offset[f * 50 + 50]);
    wanted[table].detach().index_add_(0, ids, rows * factors.unsqueeze(1));
    of_weights.push_back((rows * weight.index_select(0, ids)).sum(1));
    place += count;
  }
  for (std::size_t i = 0; i < 3; ++i) {
    expect_close(fixture.tables[i].weight.grad().to_dense(), wanted[i]);
  }
  expect_close(input.weights.grad(), at::cat(of_weights));
}

TEST(TableBatch, NobodyAsksNobodyComputes) {
  Fixture fixture;
  fixture.tables[0].weight.requires_grad_(false);
  const LookupInput input = fixture.input(5, true);
  fixture.batch->pooled(input).sum().backward();
  EXPECT_FALSE(fixture.tables[0].weight.grad().defined());
  EXPECT_FALSE(input.weights.grad().defined());
  EXPECT_TRUE(fixture.tables[1].weight.grad().defined());
}

TEST(TableBatch, IdsOutsideTheirTable) {
  LookupInput input;
  input.ids = longs({3, 10, 2, 0, 7});
  input.offsets = longs({0, 2, 2, 3, 4, 4, 5, 5, 5});
  for (const auto mode :
       {BoundsCheckMode::kFatal, BoundsCheckMode::kWarning, BoundsCheckMode::kIgnore}) {
    Fixture fixture({.gradients = GradientForm::kSparse, .bounds_check = mode});
    fixture.batch->pooled(input);  // everything is inside
    input.ids[1] = std::int64_t{1} << 40;
    if (mode == BoundsCheckMode::kFatal) {
      EXPECT_EQ(error_text([&] { fixture.batch->pooled(input); }),
                "embedding.pooled: feature 'a', sample 0 has id 1099511627776, but table 't0' has "
                "11 rows.");
      EXPECT_EQ(error_text([&] { fixture.batch->sequence(input); }),
                "embedding.sequence: feature 'a', sample 0 has id 1099511627776, but table 't0' "
                "has 11 rows.");
      EXPECT_THROW(fixture.batch->pooled(input), c10::IndexError);
      input.ids[1] = 10;
      input.ids[2] = -1;
      EXPECT_EQ(error_text([&] { fixture.batch->pooled(input); }),
                "embedding.pooled: feature 'b', sample 0 has id -1, but table 't1' has 7 rows.");
      input.ids[2] = 2;
      continue;
    }
    const Tensor output = fixture.batch->pooled(input);
    const Tensor weight = fixture.tables[0].weight.detach();
    expect_close(output.detach()[0].slice(0, 0, 3), weight[3] + weight[0], 1e-6);
    output.sum().backward();
    EXPECT_TRUE(fixture.tables[0].weight.grad().coalesce().indices()[0].equal(longs({0, 3})));
    input.ids[1] = 10;
  }
}

TEST(TableBatch, ATableWithoutRowsGivesZeros) {
  Tensor weight = at::empty({0, 5});
  weight.requires_grad_(true);
  for (const auto form : {GradientForm::kDense, GradientForm::kSparse, GradientForm::kFused}) {
    TableBatch batch({{"t", weight}}, {{"f", 0}}, {.gradients = form});
    LookupInput input;
    input.ids = at::empty({0}, at::kLong);
    input.offsets = longs({0, 0, 0});
    const Tensor output = batch.pooled(input);
    EXPECT_TRUE(output.equal(at::zeros({2, 5})));
    output.sum().backward();
    input.ids = longs({0});
    input.offsets = longs({0, 0, 1});
    EXPECT_EQ(error_text([&] { batch.pooled(input); }),
              "embedding.pooled: feature 'f', sample 1 has id 0, but table 't' has 0 rows.");
  }
}

TEST(TableBatch, WorkBuffersStopGrowing) {
  Fixture fixture({.gradients = GradientForm::kFused});
  const LookupInput input = fixture.input(300);
  fixture.batch->pooled(input).sum().backward();
  const std::int64_t bytes = fixture.batch->workspace_bytes();
  EXPECT_GT(bytes, 0);
  for (int step = 0; step < 5; ++step) fixture.batch->pooled(input).sum().backward();
  fixture.batch->pooled(fixture.input(20)).sum().backward();
  EXPECT_EQ(fixture.batch->workspace_bytes(), bytes);
}

TEST(TableBatch, SaysWhatIsWrong) {
  const Fixture fixture;
  const TableBatch& batch = *fixture.batch;
  const LookupInput good = fixture.input(2);
  const auto text = [&](auto change) {
    LookupInput input = good;
    change(input);
    return error_text([&] { batch.pooled(input); });
  };
  EXPECT_EQ(text([](auto& input) { input.ids = input.ids.view({1, -1}); }),
            "embedding.pooled: the ids must be a contiguous tensor of one dimension.");
  EXPECT_EQ(text([](auto& input) { input.ids = input.ids.to(at::kFloat); }),
            "embedding.pooled: the ids are Float; they must be int32 or int64.");
  EXPECT_EQ(text([](auto& input) { input.offsets = input.offsets.to(at::kFloat); }),
            "embedding.pooled: the offsets are Float; they must be int32 or int64.");
  EXPECT_EQ(
      text([](auto& input) { input.offsets = input.offsets.slice(0, 1).clone(); }),
      "embedding.pooled: there are 8 offsets, and one less is no multiple of the 4 features.");
  EXPECT_EQ(text([](auto& input) { input.offsets = at::flip(input.offsets, {0}); }),
            "embedding.pooled: the offsets do not ascend from 0 to the number of ids.");
  EXPECT_EQ(text([](auto& input) { input.weights = at::ones({1}); }),
            std::string("embedding.pooled: there are 1 weights for ")
                .append(std::to_string(good.ids.numel()))
                .append(" ids."));
  EXPECT_EQ(text([](auto& input) { input.weights = at::ones(input.ids.sizes(), at::kDouble); }),
            "embedding.pooled: the weights are Double; they must be float32.");
  EXPECT_EQ(text([](auto& input) { input.batch_sizes = {2, 2}; }),
            "embedding.pooled: there are 2 batch sizes for 4 features.");
  EXPECT_EQ(text([](auto& input) { input.batch_sizes = {2, 2, 2, 3}; }),
            "embedding.pooled: there are 9 offsets for batch sizes that sum up to 9; there must be "
            "one more.");
  Tensor wrong = at::empty({2, 3});
  EXPECT_EQ(error_text([&] { batch.pooled_out(good, wrong); }),
            "embedding.pooled_out: the output must be a contiguous tensor of float32, [2, 101].");

  const Tensor weight = at::zeros({2, 3});
  EXPECT_EQ(error_text([&] { TableBatch({}, {}); }),
            "embedding.table_batch: there are 0 tables and 0 features; there must be at least one "
            "of each.");
  EXPECT_EQ(error_text([&] { TableBatch({{"t", weight.t()}}, {{"f", 0}}); }),
            "embedding.table_batch: the weights of table 't' must be a contiguous tensor [rows, "
            "columns].");
  EXPECT_EQ(error_text([&] { TableBatch({{"t", weight.to(at::kDouble)}}, {{"f", 0}}); }),
            "embedding.table_batch: the weights of table 't' are Double; rows that train are "
            "float32, float16 or bfloat16.");
  EXPECT_EQ(error_text([&] { TableBatch({{"t", at::zeros({2, 0})}}, {{"f", 0}}); }),
            "embedding.table_batch: table 't' has no columns.");
  EXPECT_EQ(error_text([&] { TableBatch({{"t", weight}, {"t", weight}}, {{"f", 0}}); }),
            "embedding.table_batch: there are two tables 't'.");
  EXPECT_EQ(error_text([&] { TableBatch({{"t", weight}}, {{"f", 1}}); }),
            "embedding.table_batch: feature 'f' names table 1 of 1.");
  EXPECT_EQ(error_text([&] {
              TableBatch({{"t", weight}}, {{"f", 0}},
                         {.gradients = GradientForm::kFused, .optimizer = {.beta1 = 1.0}});
            }),
            "embedding.optimizer: beta1 is 1; it must be at least 0 and below 1.");
  RowOptimizer optimizer({{"t", weight}}, {});
  EXPECT_EQ(error_text([&] { optimizer.clip_grad_norm(-1); }),
            "embedding.clip_grad_norm: max_norm is -1; it must not be negative.");
  EXPECT_EQ(error_text([&] { optimizer.clip_grad_value(-1); }),
            "embedding.clip_grad_value: the limit is -1; it must not be negative.");
  EXPECT_EQ(error_text([&] { optimizer.set_learning_rate(-1); }),
            "embedding.set_learning_rate: learning_rate is -1; it must be finite and not "
            "negative.");
}

}  // namespace
}  // namespace tessera::embedding
