// What the reducer leaves behind, and gradients of ranks that never had a batch.

#include <gtest/gtest.h>

#include <cstdlib>

#include <c10/core/CPUAllocator.h>

#include "data_parallel/models.h"

namespace tessera::testing {
namespace {

TEST(BucketReducer, LeavesTheProcessAsItWas) {
  c10::Allocator* before = c10::GetCPUAllocator();
  run_ranks(2, [&](const comm::Group& world) {
    auto net = std::make_shared<Layers>(2, 64);
    DistributedDataParallel model(net, world, {.gradient_as_bucket_view = true});
    EXPECT_NE(c10::GetCPUAllocator(), before);  // gradients are computed in their places
    for (int step = 0; step < 3; ++step) {
      clear_gradients(*net);
      loss_of(model(sample(step, {4, 64}))).backward();
    }
    EXPECT_GT(model.replica().logging_data().integers.at("num_gradients_in_place"), 0);
  });
  EXPECT_EQ(c10::GetCPUAllocator(), before);
  EXPECT_EQ(std::getenv("DDP_DISABLE_COMM_MEM"), nullptr);
}

struct Table : torch::nn::Module {
  Table() {
    rows = register_module("rows",
                           torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true)));
    fill(*this, 3);
  }
  at::Tensor forward(const at::Tensor& ids) { return rows(ids); }
  torch::nn::Embedding rows{nullptr};
};

TEST(BucketReducer, AddsNothingForARankThatNeverHadASparseGradient) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Table>();
    DistributedDataParallel model(net, world);
    model.join([&] {
      if (world.rank() == 1) return;
      model(at::arange(3)).sum().backward();
      const at::Tensor gradient = net->rows->weight.grad().to_dense();
      expect_near(gradient.slice(0, 0, 3), at::full({3, 2}, 0.5), "used rows", 1e-6);
      expect_near(gradient.slice(0, 3), at::zeros({2, 2}), "other rows", 1e-6);
    });
  });
}

}  // namespace
}  // namespace tessera::testing
