// The operators on a GPU, judged by the same on the CPU.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tessera/jagged/keyed_jagged_tensor.h"
#include "tessera/jagged/operators.h"
#include "tessera/jagged/validate.h"

namespace tessera::jagged {
namespace {

class JaggedCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

bool same(const at::Tensor& gpu, const at::Tensor& cpu) {
  return gpu.is_cuda() && at::equal(gpu.cpu(), cpu);
}

TEST_F(JaggedCuda, OperatorsEqualTheCpu) {
  const at::Tensor lengths = at::randint(0, 6, {200}, at::kLong);
  const auto total = lengths.sum().item<std::int64_t>();
  const at::Tensor values = at::randn({total, 3});
  const at::Tensor order = at::randint(0, 200, {300}, at::kLong);
  const at::Tensor offsets = lengths_to_offsets(lengths);
  EXPECT_TRUE(same(lengths_to_offsets(lengths.cuda()), offsets));
  EXPECT_TRUE(same(offsets_to_lengths(offsets.cuda()), lengths));
  EXPECT_TRUE(same(offsets_range(offsets.cuda(), total), offsets_range(offsets, total)));
  const auto moved = permute_1d(order.cuda(), lengths.cuda(), values.cuda());
  EXPECT_TRUE(same(moved.values, permute_1d(order, lengths, values).values));
  for (const std::int64_t length : {0, 2, 9}) {
    const at::Tensor dense = jagged_to_padded_dense(values, offsets, length, 1.5);
    EXPECT_TRUE(same(jagged_to_padded_dense(values.cuda(), offsets.cuda(), length, 1.5), dense));
    EXPECT_TRUE(same(padded_dense_to_jagged(dense.cuda(), offsets.cuda(), total),
                     padded_dense_to_jagged(dense, offsets, total)));
  }
  const at::Tensor ids = at::randint(-20, 200, {total}, at::kLong);
  const auto unique = unique_ids(lengths, ids, {120, 80});
  const auto unique_gpu = unique_ids(lengths.cuda(), ids.cuda(), {120, 80});
  EXPECT_TRUE(same(unique_gpu.ids, unique.ids));
  EXPECT_TRUE(same(unique_gpu.lengths, unique.lengths));
  EXPECT_TRUE(same(unique_gpu.reverse_index, unique.reverse_index));
  for (const auto type : {at::kInt, at::kLong}) {
    const BucketizeOptions options{.num_buckets = 3,
                                   .bags_per_feature = {50, 150},
                                   .block_sizes = {7, 40},
                                   .block_starts = {{}, {0, 5, 60, 90}},
                                   .positions = true,
                                   .unbucketize = true};
    const at::Tensor weights = at::randn({total});
    const auto cpu = bucketize(lengths, ids.to(type), weights, options);
    const auto gpu = bucketize(lengths.cuda(), ids.to(type).cuda(), weights.cuda(), options);
    EXPECT_TRUE(same(gpu.lengths, cpu.lengths));
    EXPECT_TRUE(same(gpu.values, cpu.values));
    EXPECT_TRUE(same(gpu.weights, cpu.weights));
    EXPECT_TRUE(same(gpu.positions, cpu.positions));
    EXPECT_TRUE(same(gpu.unbucketize_permute, cpu.unbucketize_permute));
  }
}

TEST_F(JaggedCuda, SegmentsOfEveryWidthAndOrderMoveAsOnTheCpu) {
  at::manual_seed(2);
  const at::Tensor lengths = at::randint(0, 9, {7, 30}, at::kInt);
  const auto total = lengths.sum().item<std::int64_t>();
  const at::Tensor orders[] = {at::tensor({6, 0, 3, 1, 5, 2, 4}, at::kLong),  // all of them
                               at::tensor({2, 2, 5}, at::kInt), at::empty({0}, at::kLong)};
  const std::pair<at::ScalarType, std::vector<std::int64_t>> forms[] = {
      {at::kByte, {total}},     {at::kByte, {total, 3}},   {at::kFloat, {total}},
      {at::kLong, {total}},     {at::kDouble, {total, 2}}, {at::kFloat, {total, 5}},
      {at::kFloat, {total, 4}}, {at::kBFloat16, {total}},  {at::kFloat, {total, 0}}};
  for (const at::Tensor& order : orders) {
    for (const auto& [type, shape] : forms) {
      const at::Tensor values = at::randint(0, 200, shape, at::kLong).to(type);
      const at::Tensor weights = at::rand({total});
      const auto cpu = permute_2d(order, lengths, values, weights);
      for (const bool is_known : {true, false}) {  // to the host
        const auto gpu = permute_2d(is_known ? order : order.cuda(), lengths.cuda(), values.cuda(),
                                    weights.cuda());
        EXPECT_TRUE(same(gpu.lengths, cpu.lengths));
        EXPECT_TRUE(same(gpu.values, cpu.values));
        EXPECT_TRUE(same(gpu.weights, cpu.weights));
      }
    }
  }
  const at::Tensor none = at::empty({0}, at::kLong);
  EXPECT_TRUE(same(permute_1d(none, none.cuda(), none.cuda()).values, none));
  EXPECT_TRUE(same(lengths_to_offsets(none.cuda()), at::zeros({1}, at::kLong)));
}

TEST_F(JaggedCuda, GradientsFlowThroughMovesAndBuckets) {
  const at::Tensor lengths = at::tensor({2, 0, 3}, at::kLong);
  const at::Tensor ids = at::tensor({7, 1, 4, 9, 2}, at::kLong);
  const at::Tensor order = at::tensor({2, 0, 2}, at::kLong);
  const BucketizeOptions options{
      .num_buckets = 2, .bags_per_feature = {3}, .block_sizes = {5}, .block_starts = {}};
  at::Tensor found[2];
  for (const bool is_gpu : {false, true}) {
    const auto on = [&](const at::Tensor& tensor) { return is_gpu ? tensor.cuda() : tensor; };
    at::Tensor weights = on(at::arange(1, 6, at::kFloat)).requires_grad_(true);
    const at::Tensor moved = permute_1d(on(order), on(lengths), on(ids), weights).weights;
    const at::Tensor spread = bucketize(on(lengths), on(ids), weights, options).weights;
    (moved.pow(2).sum() + (spread * on(at::arange(5, at::kFloat))).sum()).backward();
    found[is_gpu ? 1 : 0] = weights.grad();
  }
  EXPECT_TRUE(same(found[1], found[0]));
}

TEST_F(JaggedCuda, LongBagsKeepTheirOrderInBuckets) {
  at::manual_seed(4);
  const at::Tensor lengths = at::tensor({0, 1, 500, 7, 8, 9, 33, 1000}, at::kLong);
  const auto total = lengths.sum().item<std::int64_t>();
  for (const auto type : {at::kInt, at::kLong}) {
    for (const std::int64_t num_buckets : {1, 2, 5, 40}) {
      const at::Tensor ids = at::randint(-5, 300, {total}, at::kLong).to(type);
      const BucketizeOptions options{.num_buckets = num_buckets,
                                     .bags_per_feature = {3, 0, 5},
                                     .block_sizes = {11, 1, 60},
                                     .block_starts = {},
                                     .positions = true,
                                     .unbucketize = true};
      const auto cpu = bucketize(lengths, ids, {}, options);
      const auto gpu = bucketize(lengths.cuda(), ids.cuda(), {}, options);
      EXPECT_TRUE(same(gpu.lengths, cpu.lengths));
      EXPECT_TRUE(same(gpu.values, cpu.values));
      EXPECT_TRUE(same(gpu.positions, cpu.positions));
      EXPECT_TRUE(same(gpu.unbucketize_permute, cpu.unbucketize_permute));
    }
  }
}

TEST_F(JaggedCuda, BatchesEqualTheCpu) {
  const at::Tensor lengths = at::randint(0, 6, {3 * 40}, at::kInt);
  const auto total = lengths.sum().item<std::int64_t>();
  KeyedJaggedFields fields;
  fields.weights = at::randn({total});
  const auto cpu = KeyedJaggedTensor::from_lengths_sync(
      {"a", "b", "c"}, at::randint(0, 9, {total}, at::kLong), lengths, fields);
  const auto gpu = cpu.to(at::kCUDA);
  gpu.unsync();
  EXPECT_EQ(gpu.length_per_key(), cpu.length_per_key());
  EXPECT_TRUE(kjt_is_equal(gpu.permute({2, 0, 2}).to(at::kCPU), cpu.permute({2, 0, 2})));
  EXPECT_TRUE(kjt_is_equal(gpu.split({1, 2})[1].to(at::kCPU), cpu.split({1, 2})[1]));
  EXPECT_TRUE(jt_is_equal(gpu["b"].to(at::kCPU), cpu["b"]));
  EXPECT_EQ(gpu.str(), cpu.str());
  validate(gpu, {{"a", 9}, {"b", 9}, {"c", 9}});
}

}  // namespace
}  // namespace tessera::jagged
