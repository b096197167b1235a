// Models under DistributedDataParallel, with what their communication hooks keep.

#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "checkpoint/quiet.h"
#include "checkpoint/samples.h"
#include "support/ranks.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/replicas.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/tables.h"
#include "tessera/data_parallel/hooks.h"
#include "tessera/data_parallel/optimizer_in_backward.h"
#include "tessera/data_parallel/powersgd.h"

namespace tessera::checkpoint::testing {
namespace {

using data_parallel::CommHook;
using data_parallel::DistributedDataParallel;
using tessera::testing::run_ranks;
using tessera::testing::text_of;

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(8, 6));
    second = register_module("second", torch::nn::Linear(6, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
};

using Ddp = DistributedDataParallel<Net>;

at::Tensor batch_of(int step, int rank) {
  return at::arange(32, at::kFloat).reshape({4, 8}).add(10 * step + 3 * rank).sin();
}

std::shared_ptr<CommHook> make_hook(int kind) {
  data_parallel::PowerSgdOptions options;
  options.start_step = 1;
  options.min_compression_rate = 1;
  switch (kind) {
    case 1:
      return data_parallel::int8_error_feedback_hook();
    case 2:
      return data_parallel::power_sgd_hook(options);
    case 3:
      return data_parallel::hook_then_optimizer(data_parallel::all_reduce_hook(),
                                                data_parallel::adam_in_backward({.lr = 0.02}));
    case 4:
      return data_parallel::hook_then_optimizer(
          data_parallel::int8_error_feedback_hook(),
          data_parallel::sgd_in_backward({.lr = 0.05, .momentum = 0.9}));
    default:
      return nullptr;
  }
}

// A model, its optimizer unless the hook has one, and their state.
struct Job {
  Job(const comm::Group& group, int kind, bool is_mixed)
      : model(is_mixed ? Ddp(std::make_shared<Net>(), group, {},
                             {.param_dtype = at::kBFloat16,
                              .reduce_dtype = std::nullopt,
                              .buffer_dtype = std::nullopt})
                       : Ddp(std::make_shared<Net>(), group)),
        optimizer(model.parameters(), torch::optim::AdamOptions(0.02)),
        has_optimizer(kind < 3) {
    if (auto hook = make_hook(kind)) model.register_comm_hook(std::move(hook));
    add_module(state, model);
    if (has_optimizer) add_optimizer(state, optimizer, model);
  }

  void train(int first_step, int num_steps) {
    for (int step = first_step; step < first_step + num_steps; ++step) {
      optimizer.zero_grad();
      model(batch_of(step, model.group().rank())).to(at::kFloat).square().mean().backward();
      if (has_optimizer) optimizer.step();
    }
  }

  Ddp model;
  torch::optim::Adam optimizer;
  bool has_optimizer;
  State state;
};

TEST(Replicas, TrainingContinuesBitForBitWithEveryKindOfHook) {
  for (const int size : {1, 3}) {
    for (int kind = 0; kind < 6; ++kind) {
      const bool is_mixed = kind == 5;
      const TemporaryFolder root;
      std::mutex mutex;
      std::map<int, std::map<std::string, at::Tensor>> expected;
      std::map<int, std::map<std::string, at::Tensor>> hooks;
      run_ranks(size, [&](const comm::Group& group) {
        Job job(group, is_mixed ? 0 : kind, is_mixed);
        job.train(0, 3);
        save(root.path(), 3, job.state, group, quiet());
        {
          const std::lock_guard lock(mutex);
          auto& copies = hooks[group.rank()];
          const auto hook = job.model.replica().comm_hook();
          if (hook) {
            for (const auto& [name, tensor] : hook->state().tensors) copies[name] = tensor.clone();
          }
        }
        job.train(3, 3);
        const std::lock_guard lock(mutex);
        for (const auto& [name, tensor] : job.model.state_dict()) {
          expected[group.rank()][name] = tensor.clone();
        }
      });
      run_ranks(size, [&](const comm::Group& group) {
        Job job(group, is_mixed ? 0 : kind, is_mixed);
        EXPECT_EQ(load(root.path(), job.state, group, quiet_load()).step, 3);
        const auto hook = job.model.replica().comm_hook();
        const auto loaded = hook ? hook->state().tensors : std::map<std::string, at::Tensor>();
        const auto& copies = hooks.at(group.rank());
        ASSERT_EQ(loaded.size(), copies.size());
        for (const auto& [name, tensor] : loaded) {
          EXPECT_TRUE(at::equal(tensor, copies.at(name))) << name << ", hook " << kind;
        }
        job.train(3, 3);
        for (const auto& [name, tensor] : job.model.state_dict()) {
          const at::Tensor& wanted = expected.at(group.rank()).at(name);
          // Matrix products round by where their factors lie, and PowerSGD's lie in buckets.
          EXPECT_TRUE(kind == 2 ? at::allclose(tensor, wanted, 1e-4, 1e-6)
                                : at::equal(tensor, wanted))
              << name << ", hook " << kind << ", " << size << " ranks";
        }
      });
    }
  }
}

TEST(Replicas, ErrorFeedbackOfOtherRanksIsNotLost) {
  for (const auto& [saved, loaded] : {std::pair(4, 2), std::pair(3, 2), std::pair(2, 3)}) {
    const TemporaryFolder root;
    std::mutex mutex;
    at::Tensor before = at::zeros({}, at::kDouble);
    at::Tensor after = at::zeros({}, at::kDouble);
    const auto losses = [](Job& job) {
      return job.model.replica().comm_hook()->state().tensors.at("error/first.weight").clone();
    };
    run_ranks(saved, [&](const comm::Group& group) {
      Job job(group, 1, false);
      job.train(0, 2);
      save(root.path(), 1, job.state, group, quiet());
      const std::lock_guard lock(mutex);
      before = before + losses(job).to(at::kDouble) / saved;
    });
    run_ranks(loaded, [&](const comm::Group& group) {
      Job job(group, 1, false);
      load(root.path(), job.state, group, quiet_load());
      const std::lock_guard lock(mutex);
      after = after + losses(job).to(at::kDouble) / loaded;
    });
    EXPECT_GT(before.abs().max().item<double>(), 0);
    EXPECT_TRUE(at::allclose(before, after, 1e-6, 1e-9)) << saved << " to " << loaded;
  }
}

TEST(Replicas, WhatIsNotThereIsRefused) {
  State state;
  const auto text = [](const auto& body) {
    try {
      body();
    } catch (...) {
      return text_of(std::current_exception());
    }
    return std::string();
  };
  EXPECT_EQ(text([&] { add_hook(state, nullptr, 0, 1); }), "checkpoint: there is no hook to save.");
  EXPECT_EQ(text([&] { add_hook(state, data_parallel::noop_hook(), 2, 2); }),
            "checkpoint: rank 2 of 2 does not exist.");
  EXPECT_EQ(text([&] { add_tables(state, nullptr); }), "checkpoint: there are no tables to save.");
}

}  // namespace
}  // namespace tessera::checkpoint::testing
