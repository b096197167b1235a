#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>

#include "data_parallel/hook_steps.h"
#include "support/error_text.h"
#include "support/ranks.h"
#include "tessera/comm/collectives.h"
#include "tessera/data_parallel/finite_check.h"
#include "tessera/data_parallel/gradient_clipping.h"
#include "tessera/data_parallel/hooks.h"
#include "tessera/data_parallel/optimizer_in_backward.h"

namespace tessera::data_parallel {
namespace {

using comm::Group;
using tessera::testing::error_text;
using tessera::testing::run_ranks;
using namespace testing;

/// One plain step in double precision; the formulas of the ordinary optimizers.
struct PlainAdam {
  AdamOptions options;
  bool decoupled;
  at::Tensor average;
  at::Tensor square;
  int step = 0;
  void apply(at::Tensor& parameter, at::Tensor gradient) {
    if (step++ == 0) {
      average = at::zeros_like(parameter);
      square = at::zeros_like(parameter);
    }
    if (decoupled) {
      parameter = parameter * (1 - options.lr * options.weight_decay);
    } else {
      gradient = gradient + options.weight_decay * parameter;
    }
    average = options.beta1 * average + (1 - options.beta1) * gradient;
    square = options.beta2 * square + (1 - options.beta2) * gradient * gradient;
    const at::Tensor mean = average / (1 - std::pow(options.beta1, step));
    const at::Tensor root = (square / (1 - std::pow(options.beta2, step))).sqrt() + options.eps;
    parameter = parameter - options.lr * mean / root;
  }
};

const Cuts kWithSliced = {{7, 6, 5}, {4}, {3, 2}, {1}, {0}};

TEST(OptimizerInBackward, AdamAndAdamWTakeTheOrdinarySteps) {
  for (const bool decoupled : {false, true}) {
    run_ranks(2, [&](const Group& group) {
      const Model model = model_with_values();
      const AdamOptions options{.lr = 0.01, .weight_decay = 0.1};
      const auto optimizer = decoupled ? adamw_in_backward(options) : adam_in_backward(options);
      const HookPtr hook = hook_then_optimizer(all_reduce_hook(), optimizer);
      EXPECT_TRUE(hook->consumes_gradients());
      std::vector<at::Tensor> expected;
      for (const at::Tensor& parameter : model.parameters) {
        expected.push_back(parameter.to(at::kDouble));
      }
      std::vector<PlainAdam> plain(expected.size(), PlainAdam{options, decoupled});
      for (int step = 0; step < 4; ++step) {
        for (std::size_t i = 0; i < expected.size(); ++i) {
          model.parameters[i].mutable_grad() = at::ones_like(model.parameters[i]);
          plain[i].apply(expected[i],
                         (gradient_of(model, i, 0, step) + gradient_of(model, i, 1, step)) / 2);
        }
        run_step(*hook, model, gradients_of(model, group.rank(), step), kWithSliced, group);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_FALSE(model.parameters[i].grad().defined());
          if (expected[i].numel() == 0) continue;
          EXPECT_LE((model.parameters[i] - expected[i]).abs().max().item<double>(), 2e-6)
              << model.names[i] << " step " << step;
        }
      }
    });
  }
}

TEST(OptimizerInBackward, SgdTakesTheOrdinarySteps) {
  for (const SgdOptions& options :
       {SgdOptions{.lr = 0.1}, SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01},
        SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}}) {
    run_ranks(2, [&](const Group& group) {
      const Model model = model_with_values();
      const HookPtr hook = hook_then_optimizer(all_reduce_hook(), sgd_in_backward(options));
      std::vector<at::Tensor> expected;
      std::vector<at::Tensor> momenta(model.names.size());
      for (const at::Tensor& parameter : model.parameters) {
        expected.push_back(parameter.to(at::kDouble));
      }
      for (int step = 0; step < 3; ++step) {
        run_step(*hook, model, gradients_of(model, group.rank(), step), kWithSliced, group);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          at::Tensor change =
              (gradient_of(model, i, 0, step) + gradient_of(model, i, 1, step)) / 2 +
              options.weight_decay * expected[i];
          if (options.momentum > 0) {
            momenta[i] = step == 0 ? change : options.momentum * momenta[i] + change;
            change = options.nesterov ? change + options.momentum * momenta[i] : momenta[i];
          }
          expected[i] = expected[i] - options.lr * change;
          if (expected[i].numel() == 0) continue;
          EXPECT_LE((model.parameters[i] - expected[i]).abs().max().item<double>(), 2e-6);
        }
      }
    });
  }
}

TEST(OptimizerInBackward, StateIsSavedAndContinued) {
  run_ranks(1, [](const Group& group) {
    const Model one = model_with_values();
    const Model other = model_with_values();
    const auto make = [] {
      return hook_then_optimizer(all_reduce_hook(), adam_in_backward({.lr = 0.1, .amsgrad = true}));
    };
    const HookPtr whole = make();
    HookPtr parts = make();
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        HookState saved = parts->state();
        EXPECT_EQ(saved.tensors.at("optimizer/conv/exp_avg").sizes(), one.parameters[1].sizes());
        EXPECT_EQ(saved.tensors.at("optimizer/conv/step").item<double>(), 2);
        for (auto& [key, tensor] : saved.tensors) tensor = tensor.contiguous().clone();
        parts = make();
        parts->load_state(saved);
      }
      run_step(*whole, one, gradients_of(one, 0, step), kWithSliced, group);
      run_step(*parts, other, gradients_of(one, 0, step), kWithSliced, group);
    }
    EXPECT_TRUE(same_bits(one.parameters, other.parameters));
  });
}

/// Parameters for every rank and step, however they are cut.
void expect_same_as_whole(int world,
                          const std::function<std::shared_ptr<BackwardOptimizer>()>& make) {
  run_ranks(world, [&](const Group& group) {
    const Model one = model_with_values();
    const Model other = model_with_values();
    const HookPtr whole = hook_then_optimizer(all_reduce_hook(), make());
    const auto own = make();
    const HookPtr shared = hook_then_zero_step(all_reduce_hook(), own);
    EXPECT_TRUE(shared->consumes_gradients());
    const Cuts one_bucket = {{7, 6, 5, 4, 3, 2, 1, 0}};
    for (int step = 0; step < 4; ++step) {
      // Buckets are cut anew; owners stay.
      const Cuts& cuts = step < 2 ? kWithSliced : one_bucket;
      const auto gradients = gradients_of(one, group.rank(), step);
      run_step(*whole, one, gradients, cuts, group);
      for (const at::Tensor& parameter : other.parameters) {
        parameter.mutable_grad() = at::ones_like(parameter);
      }
      run_step(*shared, other, gradients, cuts, group, {.flush = step % 2 == 1});
      for (const at::Tensor& parameter : other.parameters) {
        EXPECT_FALSE(parameter.grad().defined());
      }
      EXPECT_TRUE(same_bits(one.parameters, other.parameters)) << "step " << step;
    }
    // Every parameter is remembered once, by one rank; the state has them all.
    const auto elements = [](const HookState& state) {
      std::int64_t sum = 0;
      for (const auto& [key, tensor] : state.tensors) sum += tensor.numel();
      return sum;
    };
    at::Tensor remembered = at::full({1}, elements(own->state()), at::kLong);
    EXPECT_LE(remembered.item<std::int64_t>(), elements(whole->state()) / world + 300);
    comm::all_reduce_(remembered, group);
    const HookState expected = whole->state();
    const HookState all = shared->state();
    EXPECT_EQ(remembered.item<std::int64_t>() + 1, elements(all));  // the learning rate
    ASSERT_EQ(all.tensors.size(), expected.tensors.size());
    for (const auto& [key, tensor] : expected.tensors) {
      EXPECT_TRUE(at::equal(all.tensors.at(key), tensor)) << key;
    }
  });
}

TEST(ZeroStep, RanksShareTheStepAndWhatItRemembers) {
  for (const int world : {1, 2, 3}) {
    expect_same_as_whole(world, [] { return adamw_in_backward({.lr = 0.01}); });
    expect_same_as_whole(world, [] { return sgd_in_backward({.lr = 0.1, .momentum = 0.9}); });
    expect_same_as_whole(world, [] { return sgd_in_backward({.lr = 0.1}); });
  }
}

TEST(ZeroStep, StateContinuesOverAnotherNumberOfRanks) {
  const auto make = [] {
    return hook_then_zero_step(all_reduce_hook(), adam_in_backward({.lr = 0.1}));
  };
  const auto same_gradients = [](const Model& model, int step) {
    return gradients_of(model, 0, step);  // on all ranks, so that their number does not matter
  };
  HookState saved;
  std::vector<at::Tensor> at_two;
  std::vector<at::Tensor> at_four;
  run_ranks(2, [&](const Group& group) {
    const Model model = model_with_values();
    const HookPtr hook = make();
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        const HookState state = hook->state();
        if (group.rank() == 0) {
          for (const auto& [key, tensor] : state.tensors) saved.tensors[key] = tensor.clone();
          for (const at::Tensor& parameter : model.parameters) at_two.push_back(parameter.clone());
        }
      }
      run_step(*hook, model, same_gradients(model, step), kWithSliced, group);
    }
    if (group.rank() == 0) at_four = model.parameters;
  });
  run_ranks(3, [&](const Group& group) {
    const Model model = model_with_values();
    for (std::size_t i = 0; i < at_two.size(); ++i) model.parameters[i].copy_(at_two[i]);
    const HookPtr hook = make();
    hook->load_state(saved);
    EXPECT_EQ(hook->state().tensors.size(), saved.tensors.size());  // before the first step, too
    for (int step = 2; step < 4; ++step) {
      run_step(*hook, model, same_gradients(model, step), kWithSliced, group);
    }
    for (std::size_t i = 0; i < at_four.size(); ++i) {
      if (at_four[i].numel() == 0) continue;
      EXPECT_LE((model.parameters[i] - at_four[i]).abs().max().item<double>(), 1e-5)
          << model.names[i];
    }
    hook->load_state(saved);  // a second time, between steps
    EXPECT_TRUE(at::equal(hook->state().tensors.at("optimizer/conv/exp_avg"),
                          saved.tensors.at("optimizer/conv/exp_avg")));
  });
}

TEST(ZeroStep, WrongArgumentsAreNamed) {
  EXPECT_EQ(error_text([] { hook_then_zero_step(all_reduce_hook(), nullptr); }),
            "ddp.hook_then_zero_step: no optimizer.");
  const HookPtr stepping = hook_then_zero_step(all_reduce_hook(), sgd_in_backward({}));
  EXPECT_EQ(error_text([&] { hook_then_zero_step(stepping, sgd_in_backward({})); }),
            "ddp.hook_then_optimizer: 'zero_step(hook_then_optimizer(all_reduce)+sgd)' steps the "
            "parameters already.");
}

TEST(OptimizerInBackward, OnlySomeParameters) {
  run_ranks(1, [](const Group& group) {
    const Model model = model_with_values();
    const at::Tensor before = model.parameters[0].clone();
    const HookPtr hook = hook_then_optimizer(all_reduce_hook(), sgd_in_backward({.lr = 1}),
                                             std::set<std::string>{"bias"});
    EXPECT_FALSE(hook->consumes_gradients());
    const at::Tensor bias = model.parameters[2].clone();
    run_step(*hook, model, gradients_of(model, 0, 0), kWithSliced, group);
    EXPECT_TRUE(at::equal(model.parameters[0], before));
    EXPECT_TRUE(at::equal(model.parameters[2], bias - gradient_of(model, 2, 0, 0)));
  });
}

TEST(OptimizerInBackward, WrongOptionsAreNamed) {
  EXPECT_EQ(error_text([] { sgd_in_backward({.lr = -1}); }),
            "ddp.sgd_in_backward: a learning rate of -1. It cannot be negative.");
  EXPECT_EQ(error_text([] { sgd_in_backward({.momentum = -1}); }),
            "ddp.sgd_in_backward: a momentum of -1. It cannot be negative.");
  EXPECT_EQ(error_text([] { sgd_in_backward({.nesterov = true}); }),
            "ddp.sgd_in_backward: Nesterov needs a momentum and no dampening.");
  EXPECT_EQ(error_text([] { adamw_in_backward({.beta2 = 1}); }),
            "ddp.adamw_in_backward: a beta of 1. It must be at least 0 and less than 1.");
  EXPECT_EQ(error_text([] { hook_then_optimizer(all_reduce_hook(), nullptr); }),
            "ddp.hook_then_optimizer: no optimizer.");
  const HookPtr stepping = hook_then_optimizer(all_reduce_hook(), sgd_in_backward({}));
  EXPECT_EQ(error_text([&] { hook_then_optimizer(stepping, sgd_in_backward({})); }),
            "ddp.hook_then_optimizer: 'hook_then_optimizer(all_reduce)+sgd' steps the parameters "
            "already.");
  EXPECT_EQ(error_text([&] { fp16_compress_wrapper(stepping); }),
            "ddp.compress_wrapper: 'hook_then_optimizer(all_reduce)+sgd' steps parameters from the "
            "gradients it is given. Wrap the hook inside it instead.");
  EXPECT_EQ(error_text([&] { clipping_hook(stepping, {}); }),
            "ddp.clipping: 'hook_then_optimizer(all_reduce)+sgd' steps the parameters before the "
            "norm of all gradients is known.");
  EXPECT_EQ(error_text([&] { finite_check_hook(stepping); }),
            "ddp.finite_check: 'hook_then_optimizer(all_reduce)+sgd' steps the parameters before "
            "the step's end, when it is too late to raise or to skip. Use the policy that zeroes "
            "the rank.");
}

}  // namespace
}  // namespace tessera::data_parallel
