// CUDA tensors over the engines: NCCL where each rank has a GPU, host memory where ranks share one.

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include "support/ranks.h"
#include "tessera/comm/collectives.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_ranks;
using tessera::testing::test_options;

class CudaTensors : public ::testing::TestWithParam<Engine> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || at::getNumGPUs() == 0) GTEST_SKIP() << "there is no GPU here";
  }
};

INSTANTIATE_TEST_SUITE_P(Engines, CudaTensors, ::testing::Values(Engine::kShm, Engine::kGloo),
                         [](const auto& info) {
                           return info.param == Engine::kShm ? "shm" : "gloo";
                         });

TEST_P(CudaTensors, RanksThatShareAGpuReduceAndExchange) {
  run_ranks(
      3,
      [](const Group& group) {
        const auto options = at::TensorOptions(at::kCUDA).dtype(at::kFloat);
        at::Tensor sum = at::full({1000, 3}, group.rank() + 1.0, options);
        all_reduce_(sum, group);
        EXPECT_TRUE(sum.is_cuda());
        EXPECT_TRUE(at::equal(sum.cpu(), at::full({1000, 3}, 6.0)));

        const at::Tensor rows = at::full({group.rank(), 2}, group.rank(), options.dtype(at::kLong));
        const at::Tensor gathered = all_gather_v(rows, group);
        EXPECT_TRUE(gathered.is_cuda());
        const at::Tensor expected = at::tensor({1, 1, 2, 2, 2, 2}, at::kLong).view({3, 2});
        EXPECT_TRUE(at::equal(gathered.cpu(), expected));

        at::Tensor transposed = at::arange(6, options).view({2, 3}).t();
        broadcast_(transposed, 0, group);
        EXPECT_TRUE(at::equal(transposed.cpu(), at::arange(6, at::kFloat).view({2, 3}).t()));
        barrier(group);
      },
      test_options(GetParam()));
}

TEST_P(CudaTensors, MemoryIsGivenWhereItIsAskedFor) {
  run_ranks(
      2,
      [](const Group& group) {
        const auto engine = group.process_group()->getBackend(at::kCUDA);
        const auto options = at::TensorOptions(at::kCUDA).dtype(at::kFloat);
        const at::Tensor bucket = engine->allocateTensor(100, options);
        EXPECT_TRUE(bucket.is_cuda());
        EXPECT_TRUE(engine->allocateTensor(100, at::TensorOptions(at::kFloat)).is_cpu());
      },
      test_options(GetParam()));
}

TEST(CudaEngine, ARankWithAGpuOfItsOwnUsesNccl) {
  if (!at::hasCUDA() || at::getNumGPUs() == 0) GTEST_SKIP() << "there is no GPU here";
  run_ranks(1, [](const Group& group) {
    EXPECT_EQ(group.process_group()->getBackend(at::kCUDA)->getBackendName(), "nccl");
    at::Tensor tensor = at::ones({100}, at::TensorOptions(at::kCUDA));
    all_reduce_(tensor, group);
    EXPECT_TRUE(at::equal(tensor.cpu(), at::ones({100})));
  });
}

}  // namespace
}  // namespace tessera::comm
