#include "tessera/sharding/dist_data.h"

#include <gtest/gtest.h>

#include <numeric>

#include <ATen/ATen.h>

#include "support/error_text.h"
#include "support/ranks.h"

namespace tessera::sharding {
namespace {

using comm::Group;
using jagged::KeyedJaggedFields;
using jagged::KeyedJaggedTensor;
using tessera::testing::error_text;
using tessera::testing::run_ranks;

at::Tensor longs(const Sizes& numbers) { return at::tensor(numbers, at::TensorOptions(at::kLong)); }

Sizes numbers(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kLong).contiguous();
  return {wide.const_data_ptr<std::int64_t>(), wide.const_data_ptr<std::int64_t>() + wide.numel()};
}

// The bag of a key, a sample and the rank that has it, known to everybody.
Sizes bag(int rank, int key, std::int64_t sample) {
  Sizes ids((rank + 2 * key + sample) % 4);
  std::iota(ids.begin(), ids.end(), ((rank * 10 + key) * 10 + sample) * 10);
  return ids;
}

enum class Batch { kEqual, kUnequal, kVariable, kNone };

std::int64_t batch_of(Batch kind, int rank, int key) {
  if (kind == Batch::kEqual) return 3;
  if (kind == Batch::kNone) return 0;
  return kind == Batch::kUnequal ? rank : (rank + key) % 3;  // rank 0 has no sample
}

struct Bags {
  Sizes lengths;
  Sizes values;
  void add(const Sizes& ids) {
    lengths.push_back(static_cast<std::int64_t>(ids.size()));
    values.insert(values.end(), ids.begin(), ids.end());
  }
};

KeyedJaggedTensor features_of(Batch kind, int rank, int num_keys, bool is_weighted,
                              at::ScalarType type) {
  Bags bags;
  Sizes strides;
  std::vector<std::string> keys;
  for (int key = 0; key < num_keys; ++key) {
    keys.push_back(std::string("k").append(std::to_string(key)));
    strides.push_back(batch_of(kind, rank, key));
    for (std::int64_t s = 0; s < strides.back(); ++s) bags.add(bag(rank, key, s));
  }
  KeyedJaggedFields fields;
  if (is_weighted) fields.weights = longs(bags.values).to(at::kFloat);
  if (kind == Batch::kVariable) fields.stride_per_key_per_rank = longs(strides).unsqueeze(1);
  return KeyedJaggedTensor::from_lengths_sync(keys, longs(bags.values).to(type),
                                              longs(bags.lengths).to(type), fields);
}

class EachWorld : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(DistData, EachWorld, ::testing::Values(1, 2, 3, 4));

TEST_P(EachWorld, KeysGoToTheirOwners) {
  run_ranks(GetParam(), [](const Group& group) {
    const int world = group.size();
    const int me = group.rank();
    // Rank r owns r keys; rank 0 owns none, unless it is alone.
    Sizes splits;
    for (int r = 0; r < world; ++r) splits.push_back(world == 1 ? 2 : r);
    const int num_keys = static_cast<int>(std::accumulate(splits.begin(), splits.end(), 0LL));
    const int first = static_cast<int>(std::accumulate(splits.begin(), splits.begin() + me, 0LL));
    for (const auto kind : {Batch::kEqual, Batch::kUnequal, Batch::kVariable, Batch::kNone}) {
      for (const bool is_weighted : {false, true}) {
        for (const int stagger : {1, 2}) {
          if (world % stagger != 0) continue;
          const auto type = is_weighted ? at::kInt : at::kLong;
          const auto input = features_of(kind, me, num_keys, is_weighted, type);
          const auto got = KJTAllToAll(group, splits, stagger).forward(input).wait().wait();
          Bags bags;
          Sizes strides;
          std::vector<std::string> keys;
          std::vector<int> order;
          for (int x = 0; x < world / stagger; ++x) {
            for (int y = 0; y < stagger; ++y) order.push_back(x + world / stagger * y);
          }
          for (int key = first; key < first + splits[me]; ++key) {
            keys.push_back(std::string("k").append(std::to_string(key)));
            for (const int rank : order) {
              strides.push_back(batch_of(kind, rank, key));
              for (std::int64_t s = 0; s < strides.back(); ++s) bags.add(bag(rank, key, s));
            }
          }
          EXPECT_EQ(got.features.keys(), keys);
          EXPECT_EQ(numbers(got.features.lengths()), bags.lengths);
          EXPECT_EQ(numbers(got.features.values()), bags.values);
          EXPECT_EQ(got.features.values().scalar_type(), type);
          EXPECT_EQ(got.features.weights_or_none().defined(), is_weighted);
          if (is_weighted) {
            EXPECT_EQ(numbers(got.features.weights()), bags.values);
          }
          EXPECT_EQ(got.features.variable_stride_per_key(), kind == Batch::kVariable);
          if (kind == Batch::kVariable) {
            if (!keys.empty()) {
              EXPECT_EQ(numbers(got.features.stride_per_key_per_rank()), strides);
            }
          } else {
            std::int64_t batch = 0;
            for (int r = 0; r < world; ++r) batch += batch_of(kind, r, 0);
            EXPECT_EQ(got.features.stride(), batch);
          }
        }
      }
    }
  });
}

TEST_P(EachWorld, SizesOfSeveralExchangesTravelTogether) {
  run_ranks(GetParam(), [](const Group& group) {
    const int world = group.size();
    const Sizes splits(static_cast<std::size_t>(world), 1);
    std::vector<KJTSplitsAllToAllMeta> metas;
    for (const auto kind : {Batch::kEqual, Batch::kVariable, Batch::kUnequal}) {
      metas.emplace_back(group, features_of(kind, group.rank(), world, false, at::kLong), splits,
                         1);
    }
    const auto pending = fused_kjt_alltoall(metas).wait();
    ASSERT_EQ(pending.size(), 3U);
    for (std::size_t m = 0; m < metas.size(); ++m) {
      const auto alone = KJTAllToAll(group, splits).forward(metas[m].input).wait().wait();
      const auto together = pending[m].wait();
      EXPECT_TRUE(jagged::kjt_is_equal(together.features, alone.features));
      EXPECT_EQ(together.output_splits, alone.output_splits);
    }
  });
}

// The ids go out, their rows come back: out of order on the way, in order at the end.
TEST_P(EachWorld, RowsOfSentIdsComeBack) {
  run_ranks(GetParam(), [](const Group& group) {
    const int world = group.size();
    const int me = group.rank();
    Sizes splits;
    for (int r = 0; r < world; ++r) splits.push_back(world == 1 ? 2 : r);
    const int num_keys = static_cast<int>(std::accumulate(splits.begin(), splits.end(), 0LL));
    for (const auto kind : {Batch::kEqual, Batch::kUnequal, Batch::kNone}) {
      for (const bool gives_recat : {false, true}) {
        const auto input = features_of(kind, me, num_keys, false, at::kLong);
        const auto got = KJTAllToAll(group, splits).forward(input).wait().wait();
        const at::Tensor rows = at::stack({got.features.values().to(at::kDouble),
                                           got.features.values().to(at::kDouble) + 0.5},
                                          1)
                                    .requires_grad_(true);
        SequenceOptions options;
        options.batch_size_per_rank = got.stride_per_rank;
        if (gives_recat) options.sparse_features_recat = got.recat;
        const at::Tensor back =
            sequence_embeddings_alltoall(rows, got.features.lengths(), got.input_splits,
                                         got.output_splits, splits, group, options)
                .wait();
        EXPECT_EQ(numbers(back.select(1, 0).detach()), numbers(input.values()));
        (back * back).sum().backward();
        EXPECT_TRUE(at::allclose(rows.grad(), 2 * rows.detach() / world));
      }
    }
  });
}

TEST(DistData, OrdersReceivedSegments) {
  EXPECT_EQ(numbers(get_recat(2, 4)), (Sizes{0, 2, 4, 6, 1, 3, 5, 7}));
  EXPECT_EQ(numbers(get_recat(2, 4, 2)), (Sizes{0, 4, 2, 6, 1, 5, 3, 7}));
  EXPECT_FALSE(get_recat(0, 4).defined());
  EXPECT_EQ(numbers(get_recat(2, 2, 1, {1, 2})), (Sizes{0, 2, 3, 1, 4, 5}));
  EXPECT_EQ(numbers(get_recat(2, 2, 1, {2, 2})), (Sizes{0, 2, 1, 3}));
}

TEST(DistData, TellsEveryRankItsColumn) {
  run_ranks(3, [](const Group& group) {
    const std::int64_t me = group.rank();
    const auto told = exchange_splits({{me, me + 10, me + 20}, {7, 8, 9}}, group).wait();
    EXPECT_EQ(told,
              (std::vector<Sizes>{{10 * me, 10 * me + 1, 10 * me + 2}, {7 + me, 7 + me, 7 + me}}));
    EXPECT_EQ(error_text([&] { (void)exchange_splits({{1}}, group); }),
              "sharding.exchange_splits: a list has 1 numbers; the group has 3 ranks.");
  });
}

TEST(DistData, PooledRowsByEqualBatches) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor x = at::full({4, 1}, group.rank(), at::kFloat);
    EXPECT_TRUE(at::equal(pooled_embeddings_alltoall(x, {1, 1}, group).wait().detach(),
                          at::tensor(std::vector<float>{0, 1, 0, 1}).view({2, 2})));
    EXPECT_EQ(
        error_text([&] { (void)pooled_embeddings_alltoall(at::ones({3, 1}), {1, 1}, group); }),
        "sharding.pooled_embeddings_alltoall: 3 rows cannot be divided among 2 ranks. Give "
        "the batch size of each rank.");
    EXPECT_TRUE(
        at::equal(pooled_embeddings_reduce_scatter(x, group).wait().detach(), at::ones({2, 1})));
    EXPECT_EQ(pooled_embeddings_reduce_scatter(x, group, {1, 3}).wait().size(0),
              group.rank() == 0 ? 1 : 3);
  });
}

// The example of the reference page: 6 and 24 numbers in, 16 and 14 out.
TEST(DistData, FollowsTheReferenceOnVariableBatches) {
  run_ranks(2, [](const Group& group) {
    const bool is_first = group.rank() == 0;
    const std::vector<Sizes> dims = {{2}, {3, 3}};
    const auto received =
        is_first ? std::vector<Sizes>{{2}, {1}} : std::vector<Sizes>{{1, 3}, {2, 2}};
    const Sizes own = is_first ? Sizes{2, 1, 3} : Sizes{1, 2, 2};
    const at::Tensor zeros = at::arange(6, at::kFloat);
    const at::Tensor ones = 100 + at::arange(24, at::kFloat);
    const at::Tensor y =
        variable_batch_alltoall_pooled(is_first ? zeros : ones, received, own, dims, group)
            .wait()
            .detach();
    EXPECT_TRUE(at::equal(y, is_first ? at::cat({zeros.slice(0, 0, 4), ones.slice(0, 0, 12)})
                                      : at::cat({zeros.slice(0, 4), ones.slice(0, 12)})));
    EXPECT_EQ(y.numel(), is_first ? 16 : 14);
  });
}

TEST(DistData, OneToAllCutsAndCopies) {
  const auto input = features_of(Batch::kEqual, 1, 3, true, at::kLong);
  const auto parts = kjt_one_to_all(input, {1, 0, 2}, {at::kCPU, at::kMeta, at::kCPU});
  EXPECT_EQ(parts[2].keys(), (std::vector<std::string>{"k1", "k2"}));
  EXPECT_TRUE(parts[1].values().is_meta());
  EXPECT_EQ(parts[1].stride(), 3);
  EXPECT_EQ(error_text([&] { kjt_one_to_all(input, {1, 1}, {at::kCPU, at::kCPU}); }),
            "sharding.kjt_one_to_all: the parts have 2 keys; there are 3.");
  EXPECT_EQ(error_text([&] { kjt_one_to_all(input, {3}, {}); }),
            "sharding.kjt_one_to_all: there are 1 parts for 0 devices.");
}

TEST(DistData, AllToOne) {
  const std::vector<at::Tensor> parts = {at::ones({2, 1}), at::full({2, 2}, 2.F)};
  EXPECT_EQ(embeddings_all_to_one(parts, at::kCPU, 1).sizes(), (at::IntArrayRef{2, 3}));
  EXPECT_TRUE(at::equal(embeddings_all_to_one_reduce({parts[0], parts[0]}, at::kCPU),
                        at::full({2, 1}, 2.F)));
  EXPECT_EQ(error_text([] { embeddings_all_to_one({}, at::kCPU, 0); }),
            "sharding.embeddings_all_to_one: there are no parts.");
}

TEST(DistData, RefusesWhatDoesNotFit) {
  run_ranks(2, [](const Group& group) {
    EXPECT_EQ(error_text([&] { KJTAllToAll(group, {1}); }),
              "sharding.kjt_alltoall: there are splits of 1 ranks; the group has 2.");
    EXPECT_EQ(error_text([&] { KJTAllToAll(group, {1, 1}, 3); }),
              "sharding.kjt_alltoall: a stagger of 3 does not divide 2 ranks.");
    EXPECT_EQ(error_text([&] {
                (void)KJTAllToAll(group, {1, 1})
                    .forward(features_of(Batch::kEqual, 0, 3, false, at::kLong));
              }),
              "sharding.kjt_alltoall: the ranks get 2 keys; there are 3.");
    EXPECT_EQ(error_text([] { (void)fused_kjt_alltoall({}); }),
              "sharding.fused_kjt_alltoall: there is nothing to exchange.");
  });
}

}  // namespace
}  // namespace tessera::sharding
