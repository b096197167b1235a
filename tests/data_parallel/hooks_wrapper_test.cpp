// Hooks inside the wrapper: what a user gets.

#include <gtest/gtest.h>

#include <torch/nn/modules/conv.h>

#include "data_parallel/models.h"
#include "tessera/data_parallel/finite_check.h"
#include "tessera/data_parallel/hooks.h"
#include "tessera/data_parallel/model_averaging.h"
#include "tessera/data_parallel/optimizer_in_backward.h"
#include "tessera/data_parallel/powersgd.h"

namespace tessera::testing {
namespace {

using data_parallel::Bucket;
using data_parallel::HookPtr;
using data_parallel::MixedPrecisionOptions;

/// A convolution in channels_last and two linear layers.
struct Net : torch::nn::Module {
  explicit Net(std::int64_t seed = 1) {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 6, 3)));
    first = register_module("first", torch::nn::Linear(6, 20));
    second = register_module("second", torch::nn::Linear(20, 4));
    fill(*this, seed);
    conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(at::tanh(first(at::tanh(conv(x)).mean(at::IntArrayRef{2, 3}))));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
};

at::Tensor input_of(int step, int rank) {
  return sample(1000 * step + rank, {4, 3, 6, 6}, at::kFloat);
}

/// The gradients of one process that averages over the ranks' batches itself.
std::vector<at::Tensor> averaged(Net& net, int size, int step) {
  net.zero_grad();
  for (int rank = 0; rank < size; ++rank) {
    (net.forward(input_of(step, rank)).square().mean() / size).backward();
  }
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : net.parameters())
    gradients.push_back(parameter.grad().clone());
  return gradients;
}

double largest_difference(const std::vector<at::Tensor>& parameters,
                          const std::vector<at::Tensor>& expected) {
  double largest = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    largest = std::max(largest, (parameters[i].grad() - expected[i]).abs().max().item<double>());
  }
  return largest;
}

HookPtr exact_power_sgd() {
  return data_parallel::power_sgd_hook(
      {.matrix_approximation_rank = 64, .start_step = 0, .min_compression_rate = 0});
}

const std::vector<Options> kOptions = {{},
                                       {.bucket_cap_mb = 0.0001},
                                       {.bucket_cap_mb = 0.0001, .static_graph = true},
                                       {.bucket_cap_mb = 0.0001, .find_unused_parameters = true},
                                       {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = true}};

TEST(HooksInWrapper, AverageWhateverTheOptions) {
  for (const Options& options : kOptions) {
    for (const auto& make : {&data_parallel::all_reduce_hook, &exact_power_sgd}) {
      run_ranks(3, [&](const comm::Group& world) {
        auto net = std::make_shared<Net>();
        Net alone;
        DistributedDataParallel model(net, world, options);
        model.register_comm_hook(make());
        for (int step = 0; step < 4; ++step) {
          net->zero_grad();
          model(input_of(step, world.rank())).square().mean().backward();
          EXPECT_LE(largest_difference(net->parameters(), averaged(alone, 3, step)), 1e-5)
              << "step " << step;
        }
      });
    }
  }
}

TEST(HooksInWrapper, CountStepsAlsoInAStaticGraph) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Net>();
    DistributedDataParallel model(net, world, {.bucket_cap_mb = 0.0001, .static_graph = true});
    const auto hook = data_parallel::power_sgd_hook({.start_step = 2});
    model.register_comm_hook(hook);
    for (int step = 0; step < 4; ++step) {
      EXPECT_EQ(hook->step(), step);
      model(input_of(step, world.rank())).square().mean().backward();
    }
    EXPECT_GT(hook->stats().before, hook->stats().after);
  });
}

/// What is registered first is reduced last; here it is not used.
struct HalfUsed : torch::nn::Module {
  HalfUsed() {
    idle = register_module("idle", torch::nn::Linear(5, 5));
    first = register_module("first", torch::nn::Linear(5, 5));
    second = register_module("second", torch::nn::Linear(5, 5));
    fill(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  torch::nn::Linear idle{nullptr};
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
};

TEST(HooksInWrapper, BucketsThatAreSkippedDoNotStallTheStep) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<HalfUsed>();
    DistributedDataParallel model(net, world,
                                  {.bucket_cap_mb = 0.00001,
                                   .find_unused_parameters = true,
                                   .skip_all_reduce_unused_params = true});
    const auto hook = data_parallel::power_sgd_hook({.start_step = 0, .min_compression_rate = 0});
    model.register_comm_hook(hook);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(sample(step, {4, 5}, at::kFloat)).sum().backward();
      EXPECT_EQ(hook->step(), step + 1);
      EXPECT_TRUE(at::isfinite(net->first->weight.grad()).all().item<bool>());
    }
  });
}

TEST(HooksInWrapper, JoinedRanksTakePart) {
  run_ranks(3, [](const comm::Group& world) {
    // Rank 2 has no batches: under the divisor of those still active, the average of two.
    auto net = std::make_shared<Net>();
    Net alone;
    DistributedDataParallel model(net, world, {.bucket_cap_mb = 0.0001});
    model.register_comm_hook(exact_power_sgd());
    model.join(
        [&] {
          for (int step = 0; step < (world.rank() == 2 ? 0 : 3); ++step) {
            net->zero_grad();
            model(input_of(step, world.rank())).square().mean().backward();
            EXPECT_LE(largest_difference(net->parameters(), averaged(alone, 2, step)), 1e-5)
                << "step " << step;
          }
        },
        {.divide_by_initial_world_size = false});
  });
}

TEST(HooksInWrapper, AfterAnExceptionTheNextStepWorks) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Net>();
    Net alone;
    DistributedDataParallel model(net, world, {.bucket_cap_mb = 0.0001});
    int step = 0;
    const HookPtr inner = exact_power_sgd();
    const HookPtr hook = data_parallel::custom_hook("fails once", [&](Bucket& bucket) {
      TORCH_CHECK(step != 2 || bucket.index() != 1, "the hook gives up");
      auto future = inner->reduce(bucket);
      if (bucket.is_last()) inner->end_step();
      return future;
    });
    model.register_comm_hook(hook);
    for (; step < 4; ++step) {
      net->zero_grad();
      const auto backward = [&] { model(input_of(step, world.rank())).square().mean().backward(); };
      if (step == 2) {
        std::string text;
        try {
          backward();
        } catch (const c10::Error& error) {
          text = error.what_without_backtrace();
        }
        EXPECT_EQ(text, "the hook gives up");
        inner->reset();
        continue;
      }
      backward();
      EXPECT_LE(largest_difference(net->parameters(), averaged(alone, 2, step)), 2e-4)
          << "step " << step;
    }
  });
}

TEST(HooksInWrapper, NaNRaisesOnAllRanksAndTheNextStepWorks) {
  const auto errors = run_ranks_collecting(2, [](const comm::Group& world) {
    auto net = std::make_shared<Net>();
    Net alone;
    DistributedDataParallel model(net, world, {.bucket_cap_mb = 0.0001});
    model.register_comm_hook(data_parallel::finite_check_hook(data_parallel::all_reduce_hook()));
    model(input_of(0, world.rank())).square().mean().backward();
    net->zero_grad();
    std::string text;
    try {
      at::Tensor loss = model(input_of(1, world.rank())).square().mean();
      (world.rank() == 1 ? loss * std::nan("") : loss).backward();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    net->zero_grad();
    model(input_of(2, world.rank())).square().mean().backward();
    EXPECT_LE(largest_difference(net->parameters(), averaged(alone, 2, 2)), 1e-6);
    TORCH_CHECK(false, text);
  });
  for (const auto& error : errors) {
    EXPECT_EQ(text_of(error),
              "ddp.finite_check: step 2: rank 1 has NaN in the gradient of 'second.bias'. It has "
              "not reached the other ranks; this step's gradients are void.");
  }
}

TEST(HooksInWrapper, TheOptimizerRunsInBackward) {
  for (const bool view : {false, true}) {
    run_ranks(2, [&](const comm::Group& world) {
      auto net = std::make_shared<Net>();
      Net alone;
      DistributedDataParallel model(net, world,
                                    {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = view});
      model.register_comm_hook(data_parallel::hook_then_optimizer(
          data_parallel::all_reduce_hook(),
          data_parallel::sgd_in_backward({.lr = 0.1, .momentum = 0.5})));
      std::vector<at::Tensor> momenta;
      for (int step = 0; step < 4; ++step) {
        model(input_of(step, world.rank())).square().mean().backward();
        const auto gradients = averaged(alone, 2, step);
        const auto parameters = alone.parameters();
        const at::NoGradGuard no_grad;
        for (std::size_t i = 0; i < gradients.size(); ++i) {
          if (step == 0) {
            momenta.push_back(gradients[i]);
          } else {
            momenta[i] = 0.5 * momenta[i] + gradients[i];
          }
          at::Tensor(parameters[i]).sub_(0.1 * momenta[i]);
          const at::Tensor ours = net->parameters()[i];
          EXPECT_FALSE(ours.grad().defined());
          EXPECT_LE((ours - parameters[i]).abs().max().item<double>(), 1e-6) << "step " << step;
        }
      }
    });
  }
}

TEST(HooksInWrapper, MixedPrecisionTrainsMasters) {
  for (const Options& options : kOptions) {
    run_ranks(2, [&](const comm::Group& world) {
      auto net = std::make_shared<Net>();
      Net alone;
      const auto before = net->conv->weight.detach().clone();
      {
        DistributedDataParallel<Net> model(
            net, world, options,
            MixedPrecisionOptions{.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16});
        for (int step = 0; step < 4; ++step) {
          for (at::Tensor parameter : model.parameters()) parameter.mutable_grad().reset();
          const at::Tensor output = model(input_of(step, world.rank()));
          EXPECT_EQ(output.scalar_type(), at::kBFloat16);
          output.to(at::kFloat).square().mean().backward();
          const auto expected = averaged(alone, 2, step);
          double largest = 0;
          for (const at::Tensor& gradient : expected) {
            largest = std::max(largest, gradient.abs().max().item<double>());
          }
          EXPECT_EQ(model.parameters()[0].grad().scalar_type(), at::kFloat);
          EXPECT_LE(largest_difference(model.parameters(), expected), 0.05 * largest);
        }
        // Saved and loaded in full precision, whatever the module computes with.
        const auto state = model.state_dict();
        EXPECT_TRUE(at::equal(state.at("conv.weight"), before));
        auto other = state;
        other["conv.weight"] = before + 1;
        model.load_state_dict(other);
        EXPECT_TRUE(at::equal(model.parameters()[0].detach(), before + 1));
      }
      EXPECT_EQ(net->conv->weight.scalar_type(), at::kFloat);
      EXPECT_TRUE(net->conv->weight.requires_grad());
    });
  }
}

}  // namespace
}  // namespace tessera::testing
