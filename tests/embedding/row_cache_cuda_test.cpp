// Tables in host memory, with and without a cache in the GPU's, train as tables in the GPU's memory
// do, bit by bit: which rows are near decides nothing but the time.

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "embedding/table_batches.h"

namespace tessera::embedding {
namespace {

using at::Tensor;
using tessera::testing::kEveryOptimizer;

constexpr std::int64_t kBatch = 32;
/// 400, 300 and 200 rows of 8, 20 and 128 columns; the second a mean that serves two features.
constexpr std::int64_t kRows[] = {400, 300, 200};
constexpr std::int64_t kColumns[] = {8, 20, 128};

TableBatchOptions fused(OptimizerKind kind, bool is_random = false) {
  TableBatchOptions options;
  options.gradients = GradientForm::kFused;
  options.optimizer.kind = kind;
  options.optimizer.stochastic_rounding = is_random;
  options.optimizer.seed = 11;
  options.bounds_check = BoundsCheckMode::kIgnore;
  return options;
}

/// Equal tables: in the GPU's memory, and in the host's with room for `cached_rows[t]` of table t;
/// 0: no cache.
struct Twins {
  Twins(const TableBatchOptions& options, std::vector<std::int64_t> cached_rows,
        at::ScalarType type = at::kFloat) {
    at::manual_seed(3);
    std::vector<Table> near;
    std::vector<Table> far;
    std::vector<Feature> features;
    for (std::size_t i = 0; i < 3; ++i) {
      const std::string name = std::string("t").append(std::to_string(i));
      const Tensor weight = at::rand({kRows[i], kColumns[i]}).sub_(0.5).to(type);
      const auto pooling = i == 1 ? PoolingType::kMean : PoolingType::kSum;
      near.push_back({name, weight.cuda(), pooling});
      Tensor mapped = mapped_rows(kRows[i], kColumns[i], type, at::kCUDA);
      mapped.copy_(weight);
      far.push_back({name, mapped, pooling, cached_rows[i]});
      features.push_back({name, static_cast<std::int64_t>(i)});
    }
    features.push_back({"again", 1});
    resident.emplace(near, features, options);
    cached.emplace(far, features, options);
  }

  void expect_equal(const char* when) const {
    cached->write_back();
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::equal(resident->tables()[i].weight, cached->tables()[i].weight))
          << when << ", weights of table " << i;
    }
    const auto expected = resident->optimizer()->state_dict();
    const auto actual = cached->optimizer()->state_dict();
    for (const auto& [name, tensor] : expected) {
      EXPECT_TRUE(at::equal(tensor, actual.at(name))) << when << ", " << name;
    }
  }

  std::optional<TableBatch> resident;
  std::optional<TableBatch> cached;
};

/// Four features; ids of a moving window, so that rows come, stay for some calls and leave.
LookupInput window(int call, std::int64_t width = 40, at::ScalarType type = at::kLong) {
  at::manual_seed(100 + call);
  const Tensor lengths = at::randint(0, 7, {4 * kBatch}, at::kLong);
  LookupInput input;
  input.offsets = at::cat({at::zeros({1}, at::kLong), lengths.cumsum(0)}).cuda();
  const std::int64_t count = lengths.sum().item<std::int64_t>();
  input.ids =
      at::randint(width, {count}, at::kLong).add_(call * 13).remainder_(200).to(type).cuda();
  return input;
}

void step(const TableBatch& batch, const LookupInput& input, const Tensor& gradient) {
  batch.pooled(input).backward(gradient);
}

Tensor gradient_of(int call) {
  at::manual_seed(200 + call);
  return at::rand({kBatch, 8 + 20 + 128 + 20}).sub_(0.5).cuda();
}

TEST(RowCache, EveryRuleTrainsWithTheBitsOfTablesThatAreNear) {
  for (const OptimizerKind kind : kEveryOptimizer) {
    Twins twins(fused(kind), {60, 100, 50});
    for (int call = 0; call < 30; ++call) {
      const LookupInput input = window(call, 40, call % 2 == 0 ? at::kLong : at::kInt);
      const Tensor near = twins.resident->pooled(input);
      const Tensor far = twins.cached->pooled(input);
      ASSERT_TRUE(at::equal(near, far)) << name_of(kind) << ", call " << call;
      near.backward(gradient_of(call));
      far.backward(gradient_of(call));
    }
    twins.expect_equal(std::string(name_of(kind)).c_str());
  }
}

TEST(RowCache, RowsOf16BitsRoundedAtRandomAreThoseOfTheirRows) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    for (const auto kind : {OptimizerKind::kRowWiseAdagrad, OptimizerKind::kAdam}) {
      Twins twins(fused(kind, /*is_random=*/true), {60, 100, 50}, type);
      for (int call = 0; call < 20; ++call) {
        step(*twins.resident, window(call), gradient_of(call));
        step(*twins.cached, window(call), gradient_of(call));
      }
      twins.expect_equal("rounded at random");
    }
  }
}

TEST(RowCache, EitherPolicyAndTablesWithoutACacheBesideThem) {
  for (const auto policy : {CachePolicy::kLru, CachePolicy::kLfu}) {
    TableBatchOptions options = fused(OptimizerKind::kRowWiseAdagrad);
    options.cache_policy = policy;
    Twins twins(options, {60, 0, 50});
    for (int call = 0; call < 20; ++call) {
      step(*twins.resident, window(call), gradient_of(call));
      step(*twins.cached, window(call), gradient_of(call));
    }
    twins.expect_equal("one table without a cache");
    EXPECT_EQ(twins.cached->cache_statistics().size(), 2U);
  }
}

/// What stays is told by what has to be loaded again.
TEST(RowCache, ThePolicySaysWhichRowsLeave) {
  const auto loads = [](CachePolicy policy, const std::vector<std::vector<std::int64_t>>& calls) {
    TableBatchOptions options = fused(OptimizerKind::kSgd);
    options.cache_policy = policy;
    Tensor weight = mapped_rows(10, 4, at::kFloat, at::kCUDA);
    weight.zero_();
    const TableBatch batch({{"t", weight, PoolingType::kSum, 3}}, {{"t", 0}}, options);
    std::vector<std::int64_t> loaded;
    for (const auto& ids : calls) {
      LookupInput input;
      input.ids = at::tensor(ids, at::kLong).cuda();
      input.offsets = at::tensor({std::int64_t{0}, static_cast<std::int64_t>(ids.size())}).cuda();
      const std::int64_t before = batch.cache_statistics()[0].num_loaded;
      batch.pooled(input).sum().backward();
      loaded.push_back(batch.cache_statistics()[0].num_loaded - before);
    }
    EXPECT_EQ(batch.cache_statistics()[0].num_grown, 0);
    return loaded;
  };
  using Loads = std::vector<std::int64_t>;
  // 0 is used three times, then 1 and 2; 3 pushes out 0 if the oldest goes, 1 if the rarest does.
  const std::vector<std::vector<std::int64_t>> calls{{0}, {0, 0}, {0}, {1}, {2, 2}, {3}, {0}, {1}};
  EXPECT_EQ(loads(CachePolicy::kLru, calls), (Loads{1, 0, 0, 1, 1, 1, 1, 1}));
  EXPECT_EQ(loads(CachePolicy::kLfu, calls), (Loads{1, 0, 0, 1, 1, 1, 0, 1}));
  EXPECT_EQ(loads(CachePolicy::kLru, {{4, 5, 6}, {4, 5, 6, 6}, {6, 5}}), (Loads{3, 0, 0}));
}

TEST(RowCache, RowsAreBroughtAheadOnAnotherStreamWhileEarlierCallsAreAtWork) {
  Twins twins(fused(OptimizerKind::kRowWiseAdagrad), {120, 200, 110});
  const c10::Device gpu(at::kCUDA, 0);
  const c10::Stream side = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(gpu);
  LookupInput next = window(0);
  for (int call = 0; call < 30; ++call) {
    const LookupInput input = next;
    const Tensor near = twins.resident->pooled(input);
    const Tensor far = twins.cached->pooled(input);
    next = window(call + 1);
    {
      const c10::StreamGuard beside(side);
      twins.cached->prefetch(next);
    }
    ASSERT_TRUE(at::equal(near, far)) << call;
    near.backward(gradient_of(call));
    far.backward(gradient_of(call));
  }
  twins.expect_equal("prefetched");
  for (const auto& table : twins.cached->cache_statistics()) {
    EXPECT_EQ(table.num_calls, 30) << table.table;
    EXPECT_EQ(table.num_grown, 0) << table.table;
  }
}

TEST(RowCache, ABatchThatDoesNotFitMakesItGrow) {
  Twins twins(fused(OptimizerKind::kAdam), {5, 300, 7});
  for (int call = 0; call < 8; ++call) {
    step(*twins.resident, window(call, 60), gradient_of(call));
    step(*twins.cached, window(call, 60), gradient_of(call));
  }
  twins.expect_equal("grown");
  const auto all = twins.cached->cache_statistics();
  EXPECT_GT(all[0].num_grown, 0);
  EXPECT_GT(all[0].cached_rows, 5);
  EXPECT_EQ(all[1].num_grown, 0);
}

TEST(RowCache, GraphsGoneThroughTwiceAndSequences) {
  Twins twins(fused(OptimizerKind::kSgd), {60, 100, 50});
  const LookupInput input = window(1);
  for (TableBatch* batch : {&*twins.resident, &*twins.cached}) {
    const Tensor pooled = batch->pooled(input);
    pooled.backward(gradient_of(1), /*retain_graph=*/true);
    step(*batch, window(9), gradient_of(9));
    pooled.backward(gradient_of(2));
    const Tensor rows = batch->sequence(input);
    rows.backward(at::ones_like(rows));
  }
  twins.expect_equal("twice and sequences");
}

TEST(RowCache, TablesWrittenByOthersAreReadAnew) {
  Twins twins(fused(OptimizerKind::kSgd), {60, 100, 50});
  const LookupInput input = window(1);
  step(*twins.cached, input, gradient_of(1));
  twins.cached->write_back();
  for (const Table& table : twins.cached->tables()) Tensor(table.weight).fill_(2.0);
  const Tensor pooled = twins.cached->pooled(input);
  EXPECT_THROW(twins.cached->write_back(), c10::ValueError);       // a call is at work
  const Tensor counts = input.offsets.diff().slice(0, 0, kBatch);  // of the first feature, a sum
  EXPECT_TRUE(at::equal(pooled.select(1, 0).detach(), counts.to(at::kFloat) * 2));
}

TEST(RowCache, WhatCannotHaveOne) {
  const TableBatchOptions options = fused(OptimizerKind::kSgd);
  EXPECT_THROW(
      TableBatch({{"t", at::zeros({4, 4}).cuda(), PoolingType::kSum, 2}}, {{"t", 0}}, options),
      c10::ValueError);
  Tensor mapped = mapped_rows(4, 4, at::kFloat, at::kCUDA);
  TableBatchOptions dense;
  EXPECT_THROW(TableBatch({{"t", mapped, PoolingType::kSum, 2}}, {{"t", 0}}, dense),
               c10::ValueError);
  mapped.zero_();
  TableBatchOptions checked = options;
  checked.bounds_check = BoundsCheckMode::kFatal;
  const TableBatch batch({{"t", mapped, PoolingType::kSum, 2}}, {{"t", 0}}, checked);
  LookupInput input;
  input.ids = at::tensor({std::int64_t{4}}).cuda();
  input.offsets = at::tensor({std::int64_t{0}, std::int64_t{1}}).cuda();
  EXPECT_THROW(batch.pooled(input), c10::IndexError);
}

}  // namespace
}  // namespace tessera::embedding
