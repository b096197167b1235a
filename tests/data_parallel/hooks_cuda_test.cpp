// The hooks on gradients that live on a GPU; ranks are processes that share it, see
// support/rank_processes.h. Skipped where there is none.

#include <gtest/gtest.h>

#include <ATen/Context.h>

#include "data_parallel/hook_steps.h"
#include "data_parallel/models.h"
#include "support/rank_processes.h"
#include "tessera/data_parallel/deterministic.h"
#include "tessera/data_parallel/finite_check.h"
#include "tessera/data_parallel/gradient_clipping.h"
#include "tessera/data_parallel/hooks.h"
#include "tessera/data_parallel/optimizer_in_backward.h"
#include "tessera/data_parallel/powersgd.h"

namespace tessera::data_parallel {
namespace {

using tessera::testing::Layers;
using tessera::testing::RankProcesses;
using namespace testing;

class HooksOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || at::getNumGPUs() == 0) GTEST_SKIP() << "there is no GPU here";
  }
  void run_ranks(int size, const std::function<void(const comm::Group&)>& body) {
    ranks_.run(size, body, {.engine = comm::Engine::kGloo, .timeout = std::chrono::seconds(60)});
  }

 private:
  RankProcesses ranks_;
};

Model on_gpu(Model model) {
  for (at::Tensor& parameter : model.parameters) parameter = parameter.to(at::kCUDA);
  return model;
}

std::vector<at::Tensor> to(std::vector<at::Tensor> tensors, at::Device device) {
  for (at::Tensor& tensor : tensors) tensor = tensor.to(device);
  return tensors;
}

TEST_F(HooksOnGpu, AverageAsOnTheCpu) {
  const std::vector<std::pair<std::function<HookPtr()>, double>> cases = {
      {&all_reduce_hook, 1e-6},
      {&fp16_compress_hook, 8.0 / 2048},
      {&bf16_compress_hook, 8.0 / 256},
      {&quantization_per_tensor_hook, 0.02},
      {[] { return quantization_per_channel_hook(16); }, 0.02},
      {&int8_error_feedback_hook, 0.04},
      {&deterministic_hook, 1e-6},
      {[]() -> HookPtr {
         return power_sgd_hook(
             {.matrix_approximation_rank = 64, .start_step = 0, .min_compression_rate = 0});
       },
       1e-3},
      {[]() -> HookPtr {
         return clipping_hook(finite_check_hook(all_reduce_hook()), {.max_norm = 1e6});
       },
       1e-6}};
  for (const auto& [make, tolerance] : cases) {
    run_ranks(2, [&](const comm::Group& group) {
      const Model model = on_gpu(small_model());
      const HookPtr hook = make();
      for (int step = 0; step < 3; ++step) {
        const auto results =
            run_step(*hook, model, to(gradients_of(model, group.rank(), step), at::kCUDA),
                     kManyBuckets, group, {.device = at::kCUDA});
        EXPECT_LE(largest_difference(to(results, at::kCPU), average_of(model, 2, step)), tolerance)
            << hook->name();
      }
    });
  }
}

TEST_F(HooksOnGpu, OptimizersStepAsOnTheCpu) {
  for (const auto& make : std::vector<std::function<std::shared_ptr<BackwardOptimizer>()>>{
           [] { return sgd_in_backward({.lr = 0.1, .momentum = 0.9}); },
           [] { return adam_in_backward({.lr = 0.01}); },
           [] { return adamw_in_backward({.lr = 0.01, .weight_decay = 0.1}); }}) {
    run_ranks(2, [&](const comm::Group& group) {
      const Model here = small_model();
      const Model there = on_gpu(small_model());
      const HookPtr on_cpu = hook_then_optimizer(all_reduce_hook(), make());
      const HookPtr on_device = hook_then_optimizer(all_reduce_hook(), make());
      for (int step = 0; step < 3; ++step) {
        const auto gradients = gradients_of(here, group.rank(), step);
        run_step(*on_cpu, here, gradients, kManyBuckets, group);
        run_step(*on_device, there, to(gradients, at::kCUDA), kManyBuckets, group,
                 {.device = at::kCUDA});
      }
      EXPECT_LE(largest_difference(to(there.parameters, at::kCPU), here.parameters), 1e-5);
    });
  }
}

TEST_F(HooksOnGpu, MixedPrecisionTrains) {
  run_ranks(2, [](const comm::Group& group) {
    auto net = std::make_shared<Layers>();
    net->to(at::kCUDA, at::kFloat);
    DistributedDataParallel<Layers> model(
        net, group, {},
        MixedPrecisionOptions{.param_dtype = at::kHalf, .reduce_dtype = at::kBFloat16});
    const at::Tensor input = at::ones({4, 5}, at::TensorOptions(at::kCUDA));
    for (int step = 0; step < 3; ++step) {
      const at::Tensor output = model(input);
      EXPECT_EQ(output.scalar_type(), at::kHalf);
      output.to(at::kFloat).sum().backward();
    }
    const at::Tensor gradient = model.parameters()[0].grad();
    EXPECT_TRUE(gradient.is_cuda() && gradient.scalar_type() == at::kFloat);
    EXPECT_TRUE(at::isfinite(gradient).all().item<bool>());
  });
}

}  // namespace
}  // namespace tessera::data_parallel
