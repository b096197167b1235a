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
