// States of modules and optimizers: training goes on as if it had not stopped.

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "checkpoint/quiet.h"
#include "checkpoint/samples.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/checkpoint/save.h"

namespace tessera::checkpoint::testing {
namespace {

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(6, 5));
    second = register_module("second", torch::nn::Linear(5, 3));
    calls = register_buffer("calls", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    calls += 1;
    return second(at::tanh(first(x)));
  }
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
  at::Tensor calls;
};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(int kind, const Net& net) {
  const auto parameters = net.parameters();
  switch (kind) {
    case 0:
      return std::make_unique<torch::optim::SGD>(parameters,
                                                 torch::optim::SGDOptions(0.1).momentum(0.9));
    case 1:
      return std::make_unique<torch::optim::Adam>(parameters,
                                                  torch::optim::AdamOptions(0.01).amsgrad(true));
    case 2:
      return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
    case 3:
      return std::make_unique<torch::optim::Adagrad>(parameters,
                                                     torch::optim::AdagradOptions(0.05));
    case 4:
      return std::make_unique<torch::optim::RMSprop>(
          parameters, torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
    default:
      return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1));
  }
}

void train(Net& net, torch::optim::Optimizer& optimizer, int first_step, int num_steps) {
  for (int step = first_step; step < first_step + num_steps; ++step) {
    const at::Tensor x = at::arange(24, at::kFloat).reshape({4, 6}).add(step).sin();
    optimizer.zero_grad();
    net.forward(x).square().mean().backward();
    optimizer.step();
  }
}

void expect_same(const Net& a, const Net& b) {
  const auto expected = a.named_parameters();
  for (const auto& item : b.named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key();
  }
  EXPECT_TRUE(at::equal(a.calls, b.calls));
}

TEST(ModuleState, TrainingContinuesBitForBitWithEveryOptimizer) {
  for (int kind = 0; kind < 6; ++kind) {
    const TemporaryFolder root;
    auto net = std::make_shared<Net>();
    auto optimizer = make_optimizer(kind, *net);
    State state;
    add_module(state, net);
    add_optimizer(state, *optimizer, *net);
    state.values["position"] = std::int64_t{17};
    train(*net, *optimizer, 0, 3);
    optimizer->param_groups()[0].options().set_lr(0.003);
    save(root.path(), 3, state, std::nullopt, quiet());
    train(*net, *optimizer, 3, 4);

    // Into an optimizer that has not taken a step, and into one that has taken others.
    for (const int steps_before : {0, 2}) {
      auto other = std::make_shared<Net>();
      auto again = make_optimizer(kind, *other);
      train(*other, *again, 50, steps_before);
      State loaded;
      add_module(loaded, other);
      add_optimizer(loaded, *again, *other);
      const LoadReport report = load(root.path(), loaded, std::nullopt, quiet_load());
      EXPECT_EQ(report.step, 3);
      EXPECT_EQ(std::get<std::int64_t>(report.values.at("position")), 17);
      EXPECT_EQ(again->param_groups()[0].options().get_lr(), 0.003);
      train(*other, *again, 3, 4);
      expect_same(*net, *other);
    }
  }
}

// A load that fails leaves the optimizer as it was: without state, or with its own.
TEST(ModuleState, AFailedLoadChangesNoOptimizer) {
  const TemporaryFolder root;
  auto net = std::make_shared<Net>();
  auto optimizer = make_optimizer(1, *net);
  State state;
  add_module(state, net);
  add_optimizer(state, *optimizer, *net);
  train(*net, *optimizer, 0, 3);
  save(root.path(), 3, state, std::nullopt, quiet());
  const std::string shard = root / "step-000000000003/shard-00001-model-00001-of-00001.safetensors";
  std::string bytes = slurp(shard);
  bytes.back() ^= 1;
  spill(shard, bytes);
  for (const int steps_before : {0, 2}) {
    auto other = std::make_shared<Net>();
    auto again = make_optimizer(1, *other);
    train(*other, *again, 50, steps_before);
    auto untouched = std::make_shared<Net>();
    auto beside = make_optimizer(1, *untouched);
    {
      const at::NoGradGuard no_grad;
      const auto from = other->parameters();
      const auto to = untouched->parameters();
      if (steps_before == 0) {
        for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
      }
    }
    State loaded;
    add_module(loaded, other);
    add_optimizer(loaded, *again, *other);
    const auto num_kept = again->state().size();
    const at::Tensor first = other->first->weight.detach().clone();
    EXPECT_NE(error_of([&] { load(root.path(), loaded, std::nullopt, quiet_load()); }), "");
    EXPECT_EQ(again->state().size(), num_kept);
    EXPECT_TRUE(at::equal(other->first->weight, first));
    if (steps_before > 0) continue;
    untouched->calls.copy_(other->calls);
    train(*other, *again, 0, 2);
    train(*untouched, *beside, 0, 2);
    expect_same(*other, *untouched);
  }
}

TEST(ModuleState, UnknownOptimizerIsRefused) {
  Net net;
  torch::optim::LBFGS optimizer(net.parameters(), torch::optim::LBFGSOptions(1));
  State state;
  try {
    add_optimizer(state, optimizer, net);
    FAIL();
  } catch (const c10::TypeError& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "checkpoint: this optimizer is not known. Known are SGD, Adam, AdamW, Adagrad and "
                 "RMSprop; add the tensors of others by themselves.");
  }
}

}  // namespace
}  // namespace tessera::checkpoint::testing
