#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "jagged/composed.h"
#include "support/derivatives.h"
#include "support/error_text.h"
#include "support/ranks.h"
#include "tessera/jagged/operators.h"

namespace tessera::jagged {
namespace {

using comm::Group;
using tessera::testing::check_derivatives;
using tessera::testing::error_text;
using tessera::testing::Objective;
using tessera::testing::random_tensor;

at::Tensor longs(std::vector<std::int64_t> numbers) {
  return at::tensor(numbers, at::TensorOptions(at::kLong));
}
at::Tensor ints(std::vector<std::int64_t> numbers) {
  return longs(std::move(numbers)).to(at::kInt);
}

std::vector<std::int64_t> numbers(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kLong).contiguous();
  return {wide.const_data_ptr<std::int64_t>(), wide.const_data_ptr<std::int64_t>() + wide.numel()};
}
using Numbers = std::vector<std::int64_t>;

TEST(Jagged, OffsetsAreRunningSums) {
  for (const auto type : {at::kInt, at::kLong}) {
    const at::Tensor lengths = longs({2, 0, 3}).to(type);
    const at::Tensor offsets = lengths_to_offsets(lengths);
    EXPECT_EQ(offsets.scalar_type(), type);
    EXPECT_EQ(numbers(offsets), (Numbers{0, 2, 2, 5}));
    EXPECT_EQ(numbers(offsets_to_lengths(offsets)), (Numbers{2, 0, 3}));
    EXPECT_EQ(numbers(lengths_to_offsets(lengths.slice(0, 0, 0))), (Numbers{0}));
    EXPECT_EQ(numbers(offsets_range(offsets, 5)), (Numbers{0, 1, 0, 1, 2}));
  }
  EXPECT_EQ(numbers(lengths_to_offsets(longs({1, 9, 2, 9, 3}).slice(0, 0, 5, 2))),
            (Numbers{0, 1, 3, 6}));
}

TEST(Jagged, OffsetsThatAnInt32CannotHoldAreRefused) {
  EXPECT_EQ(error_text([] { lengths_to_offsets(ints({2147483647, 1})); }),
            "jagged.lengths_to_offsets: the lengths add up to more than an int32 can hold, from "
            "length 1 on. Use int64 lengths.");
  EXPECT_EQ(numbers(lengths_to_offsets(longs({2147483647, 1}))),
            (Numbers{0, 2147483647, 2147483648}));
  EXPECT_EQ(error_text([] { lengths_to_offsets(ints({1, -2})); }),
            "jagged.lengths_to_offsets: length 1 is -2.");
  EXPECT_EQ(error_text([] { lengths_to_offsets(longs({1, INT64_MAX, INT64_MAX, 5})); }),
            "jagged.lengths_to_offsets: the lengths add up to more than an int64 can hold, from "
            "length 1 on.");
  EXPECT_EQ(error_text([] { lengths_to_offsets(at::ones({2})); }),
            "jagged.lengths_to_offsets: the lengths must be int32 or int64, not Float.");
}

TEST(Jagged, PermuteMovesBags) {
  const at::Tensor lengths = ints({1, 0, 3, 2});
  const at::Tensor values = longs({10, 30, 31, 32, 40, 41});
  const at::Tensor weights = values.to(at::kFloat) / 10;
  const JaggedParts moved = permute_1d(ints({2, 2, 1, 3}), lengths, values, weights);
  EXPECT_EQ(numbers(moved.lengths), (Numbers{3, 3, 0, 2}));
  EXPECT_EQ(numbers(moved.values), (Numbers{30, 31, 32, 30, 31, 32, 40, 41}));
  EXPECT_TRUE(at::equal(moved.weights, moved.values.to(at::kFloat) / 10));
  const JaggedParts rows = permute_2d(longs({1, 0}), lengths.view({2, 2}), values);
  EXPECT_EQ(numbers(rows.lengths), (Numbers{3, 2, 1, 0}));
  EXPECT_EQ(numbers(rows.values), (Numbers{30, 31, 32, 40, 41, 10}));
  EXPECT_FALSE(rows.weights.defined());
  const JaggedParts none = permute_1d(longs({}), lengths, values);
  EXPECT_EQ(none.values.numel(), 0);
}

TEST(Jagged, PermuteOfManySegmentsEqualsAGather) {
  const std::int64_t n = 1000;
  const at::Tensor lengths = at::randint(0, 5, {n}, at::kLong);
  const at::Tensor values = at::randn({lengths.sum().item<std::int64_t>(), 3});
  const at::Tensor order = at::randint(0, n, {1500}, at::kLong);
  const at::Tensor expected = values.index_select(0, detail::gather_index(lengths, order));
  EXPECT_TRUE(at::equal(permute_1d(order, lengths, values).values, expected));
  EXPECT_TRUE(at::equal(permute_segments(values, numbers(lengths), numbers(order)), expected));
  // Not contiguous, and few segments.
  const at::Tensor wide = at::randn({values.size(0), 6}).slice(1, 0, 6, 2);
  EXPECT_TRUE(at::equal(permute_1d(order, lengths, wide).values,
                        wide.index_select(0, detail::gather_index(lengths, order))));
  EXPECT_TRUE(at::equal(permute_segments(wide, {2, wide.size(0) - 2}, {1, 0}),
                        at::cat({wide.slice(0, 2), wide.slice(0, 0, 2)})));
}

TEST(Jagged, GradientsOfRepeatedBagsAddUp) {
  const at::Tensor weights = at::ones({4}).requires_grad_(true);
  const JaggedParts moved =
      permute_1d(longs({1, 1, 0}), longs({1, 2, 1}), longs({1, 2, 3, 4}), weights);
  moved.weights.sum().backward();
  EXPECT_TRUE(at::equal(weights.grad(), at::tensor({1.F, 2.F, 2.F, 0.F})));
}

TEST(Jagged, PermuteRefusesWhatDoesNotFit) {
  EXPECT_EQ(error_text([] { permute_1d(longs({3}), longs({1}), longs({1})); }),
            "jagged.permute_1d: entry 0 of the order is 3; there are 1 segments.");
  EXPECT_EQ(error_text([] { permute_1d(longs({0}), longs({1}), longs({1, 2})); }),
            "jagged.permute_1d: the lengths add up to 1, but there are 2 values.");
  EXPECT_EQ(error_text([] { permute_1d(longs({0}), longs({1}), longs({1}), at::ones({2})); }),
            "jagged.permute_1d: there are 2 weights for 1 values.");
  EXPECT_EQ(error_text([] { permute_2d(longs({0}), longs({1}), longs({1})); }),
            "jagged.permute_2d: the lengths have 1 dimensions, not 2.");
  EXPECT_EQ(error_text([] { permute_1d(longs({1}), longs({-1, 3}), longs({1, 2})); }),
            "jagged.permute_1d: segment 0 has -1 values.");
  EXPECT_EQ(error_text([] { permute_segments(at::ones({2}), {3, -1}, {0}); }),
            "jagged.permute_segments: segment 1 has -1 values.");
  EXPECT_EQ(error_text([] { permute_segments(at::ones({3}), {1, 1}, {0}); }),
            "jagged.permute_segments: the segments add up to 2 rows, but there are 3.");
  EXPECT_EQ(error_text([] { permute_segments(at::ones({2}), {1, 1}, {2}); }),
            "jagged.permute_segments: entry 0 of the order is 2; there are 2 segments.");
}

// Two features of two bags, blocks of 3 in 4 buckets: in range, past the end, and negative.
TEST(Jagged, BucketizeSpreadsIdsOverBlocks) {
  const at::Tensor lengths = longs({3, 2, 0, 4});
  const at::Tensor values = longs({0, 5, 9, 10, 11, -1, 3, 7, 100});
  BucketizeOptions options{.num_buckets = 4,
                           .bags_per_feature = {2, 2},
                           .block_sizes = {3, 3},
                           .positions = true,
                           .unbucketize = true};
  const Bucketized spread = bucketize(lengths, values, {}, options);
  EXPECT_EQ(numbers(spread.lengths), (Numbers{1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 2, 0, 1}));
  EXPECT_EQ(numbers(spread.values), (Numbers{0, 25, 2, 0, 1, 0, 1, 2, 4611686018427387903}));
  EXPECT_EQ(numbers(spread.positions), (Numbers{0, 3, 1, 1, 2, 2, 0, 1, 0}));
  EXPECT_EQ(numbers(spread.unbucketize_permute), (Numbers{0, 2, 5, 6, 7, 8, 3, 4, 1}));
  EXPECT_FALSE(spread.weights.defined());
}

TEST(Jagged, BucketizeFollowsUnevenBlocks) {
  BucketizeOptions options{.num_buckets = 3,
                           .bags_per_feature = {1, 1},
                           .block_sizes = {4, 4},
                           .block_starts = {{0, 1, 1, 6}, {}}};
  const Bucketized spread = bucketize(longs({5, 2}), longs({0, 1, 5, 6, 7, 3, 4}), {}, options);
  EXPECT_EQ(numbers(spread.lengths), (Numbers{2, 1, 1, 1, 2, 0}));
  // 6 and 7 lie past the last block: bucket 6 mod 3 and 7 mod 3, ids 6 / 3 and 7 / 3.
  EXPECT_EQ(numbers(spread.values), (Numbers{0, 2, 3, 2, 0, 0, 4}));
}

TEST(Jagged, BucketizeOnTheCpuEqualsTheComposedForm) {
  for (const auto id_type : {at::kInt, at::kLong}) {
    for (const auto length_type : {at::kInt, at::kLong}) {
      for (const std::int64_t buckets : {1, 2, 3, 7}) {
        const at::Tensor lengths = at::randint(0, 6, {4 * 50}, at::kLong);
        const auto total = lengths.sum().item<std::int64_t>();
        const at::Tensor values = at::randint(-20, 200, {total}, at::kLong).to(id_type);
        const at::Tensor weights = at::randn({total});
        BucketizeOptions options{.num_buckets = buckets,
                                 .bags_per_feature = {50, 80, 0, 70},
                                 .block_sizes = {10, 1, 5, 31},
                                 .positions = true,
                                 .unbucketize = true};
        if (buckets == 3) options.block_starts = {{}, {0, 7, 7, 90}, {}, {0, 0, 100, 150}};
        const Bucketized fast = bucketize(lengths.to(length_type), values, weights, options);
        const Bucketized slow =
            detail::bucketize_composed(lengths.to(length_type), values, weights, options);
        EXPECT_TRUE(at::equal(fast.lengths, slow.lengths)) << buckets;
        EXPECT_EQ(fast.lengths.scalar_type(), length_type);
        EXPECT_TRUE(at::equal(fast.values, slow.values)) << buckets << " " << id_type;
        EXPECT_TRUE(at::equal(fast.weights, slow.weights));
        EXPECT_TRUE(at::equal(fast.positions, slow.positions));
        EXPECT_TRUE(at::equal(fast.unbucketize_permute, slow.unbucketize_permute));
        EXPECT_TRUE(at::equal(fast.weights.index_select(0, fast.unbucketize_permute), weights));
      }
    }
  }
}

TEST(Jagged, BucketizeGivesWeightsTheirGradient) {
  const at::Tensor weights = at::ones({3}).requires_grad_(true);
  BucketizeOptions options{.num_buckets = 2, .bags_per_feature = {1}, .block_sizes = {1}};
  const Bucketized spread = bucketize(longs({3}), longs({1, 0, 1}), weights, options);
  (spread.weights * at::tensor({1.F, 2.F, 3.F})).sum().backward();
  EXPECT_TRUE(at::equal(weights.grad(), at::tensor({2.F, 1.F, 3.F})));
}

TEST(Jagged, BucketizeRefusesWhatDoesNotFit) {
  const auto text = [](const BucketizeOptions& options, const at::Tensor& weights = {}) {
    return error_text([&] { bucketize(longs({1, 1}), longs({5, 6}), weights, options); });
  };
  EXPECT_EQ(text({.num_buckets = 0, .bags_per_feature = {2}, .block_sizes = {1}}),
            "jagged.bucketize: there are 0 buckets.");
  EXPECT_EQ(text({.num_buckets = 2, .bags_per_feature = {1}, .block_sizes = {1}}),
            "jagged.bucketize: the features have 1 bags, but there are 2 lengths.");
  EXPECT_EQ(text({.num_buckets = 2, .bags_per_feature = {2}}),
            "jagged.bucketize: feature 0 has no block size of at least 1.");
  EXPECT_EQ(text({.num_buckets = 2, .bags_per_feature = {2}, .block_starts = {{0, 3}}}),
            "jagged.bucketize: feature 0 has 2 block starts for 2 buckets. Give one more than "
            "buckets, rising from 0.");
  EXPECT_EQ(text({.num_buckets = 2, .bags_per_feature = {2}, .block_starts = {{}, {}}}),
            "jagged.bucketize: there are block starts for 2 features, not for 1.");
  EXPECT_EQ(text({.num_buckets = 2, .bags_per_feature = {2}, .block_sizes = {1}}, at::ones({3})),
            "jagged.bucketize: there are 3 weights for 2 ids.");
  EXPECT_EQ(error_text([] {
              bucketize(longs({1, 2}), longs({5, 6}), {},
                        {.num_buckets = 2, .bags_per_feature = {2}, .block_sizes = {1}});
            }),
            "jagged.bucketize: the lengths add up to 3, but there are 2 ids.");
}

TEST(Jagged, UniqueIdsOfEachSpace) {
  // Two features share the first space; its three ids spread over four bags.
  const UniqueIds unique =
      unique_ids(ints({2, 1, 2, 0, 1, 2}), longs({7, 3, 7, 9, 3, 3, 5, 5}), {4, 2});
  EXPECT_EQ(numbers(unique.ids), (Numbers{3, 7, 9, 3, 5}));
  EXPECT_EQ(numbers(unique.lengths), (Numbers{1, 1, 1, 0, 1, 1}));
  EXPECT_EQ(numbers(unique.reverse_index), (Numbers{1, 0, 1, 2, 0, 3, 4, 4}));
  EXPECT_EQ(unique.lengths.scalar_type(), at::kInt);
  const UniqueIds none = unique_ids(ints({0, 0}), longs({}), {1, 1});
  EXPECT_EQ(none.ids.numel(), 0);
  EXPECT_EQ(none.reverse_index.numel(), 0);
  EXPECT_EQ(error_text([] { unique_ids(longs({1}), longs({1}), {2}); }),
            "jagged.unique_ids: the spaces have 2 bags, but there are 1 lengths.");
  EXPECT_EQ(error_text([] { unique_ids(longs({1}), longs({1, 2}), {1}); }),
            "jagged.unique_ids: the lengths add up to 1, but there are 2 ids.");
}

TEST(Jagged, PaddedRowsAreCutAndFilled) {
  const at::Tensor offsets = ints({0, 2, 2, 5});
  const at::Tensor values = longs({1, 2, 3, 4, 5});
  const at::Tensor padded = jagged_to_padded_dense(values, offsets, 2, 9);
  EXPECT_EQ(numbers(padded), (Numbers{1, 2, 9, 9, 3, 4}));
  EXPECT_EQ(padded.sizes(), (at::IntArrayRef{3, 2}));
  EXPECT_EQ(numbers(padded_dense_to_jagged(padded, offsets, 5)), (Numbers{1, 2, 3, 4, 0}));
  EXPECT_EQ(jagged_to_padded_dense(values, offsets, 0).sizes(), (at::IntArrayRef{3, 0}));
  EXPECT_EQ(jagged_to_padded_dense(longs({}), longs({0}), 3).sizes(), (at::IntArrayRef{0, 3}));
  for (const std::int64_t length : {0, 1, 2, 3, 5}) {
    const at::Tensor rows = at::randn({5, 2, 3});
    const at::Tensor dense = jagged_to_padded_dense(rows, offsets, length, -1.5);
    EXPECT_TRUE(
        at::equal(dense, detail::to_padded_composed(rows, offsets.to(at::kLong), length, -1.5)));
    EXPECT_TRUE(at::equal(padded_dense_to_jagged(dense, offsets, 5),
                          detail::from_padded_composed(dense, offsets.to(at::kLong), 5)));
  }
}

TEST(Jagged, PaddedRowsHaveDerivativesOfThreeOrders) {
  const at::Tensor offsets = longs({0, 2, 2, 5});
  tessera::testing::run_ranks(1, [&](const Group& group) {
    for (const std::int64_t length : {1, 2, 4}) {
      const Objective objective{[&](const at::Tensor& x) {
        const at::Tensor dense = jagged_to_padded_dense(x.view({5, 2}).sin(), offsets, length, 0.5);
        const at::Tensor back = padded_dense_to_jagged(dense * dense, offsets, 5);
        return (random_tensor({5, 2}, 3) * back.sin()).sum() + (dense * dense * dense).sum();
      }};
      check_derivatives(objective, random_tensor({10}, 4), group, false);
    }
  });
}

TEST(Jagged, PaddedRowsRefuseWhatDoesNotFit) {
  EXPECT_EQ(error_text([] { jagged_to_padded_dense(at::ones({3}), longs({0, 2}), 2); }),
            "jagged.to_padded_dense: the offsets must rise from 0 to the number of values, 3; they "
            "go from 0 to 2.");
  EXPECT_EQ(error_text([] { jagged_to_padded_dense(at::ones({3}), longs({0, 3}), -1); }),
            "jagged.to_padded_dense: the length is -1.");
  EXPECT_EQ(error_text([] { padded_dense_to_jagged(at::ones({3, 1}), longs({0, 3}), 3); }),
            "jagged.padded_dense_to_jagged: the dense tensor has shape [3, 1], the offsets have 1 "
            "bags.");
  EXPECT_EQ(error_text([] { jagged_to_padded_dense(at::ones({3}), at::ones({2}), 2); }),
            "jagged.to_padded_dense: the offsets must be int32 or int64, not Float.");
}

}  // namespace
}  // namespace tessera::jagged
