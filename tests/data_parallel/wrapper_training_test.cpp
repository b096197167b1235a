// The wrapper against one process that sees all samples.

#include <gtest/gtest.h>

#include <random>

#include "data_parallel/models.h"
#include "data_parallel/option_sets.h"

namespace tessera::testing {
namespace {

void expect_same_training(const comm::Group& world, const Named& named, bool keeps_gradients) {
  auto alone = std::make_shared<Layers>();
  auto net = std::make_shared<Layers>(3, 5, 1 + 100 * world.rank());  // rank 0's values count
  DistributedDataParallel model(net, world, named.options);
  constexpr int kRows = 4;
  for (int step = 0; step < 8; ++step) {
    const std::string what = std::string(named.name) + ", step " + std::to_string(step) +
                             ", rank " + std::to_string(world.rank());
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < world.size(); ++rank) {
      all.push_back(sample(1000 * step + rank, {kRows, 5}));
    }
    loss_of(alone->forward(at::cat(all))).backward();
    loss_of(model(all[world.rank()])).backward();
    const auto expected = gradients(*alone);
    const auto actual = gradients(*net);
    for (std::size_t i = 0; i < expected.size(); ++i) expect_near(actual[i], expected[i], what);
    descend(*alone);
    if (keeps_gradients) {
      at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) {
        parameter.sub_(parameter.grad(), 0.1);
        parameter.mutable_grad().zero_();
      }
    } else {
      descend(*net);
    }
  }
}

TEST(DistributedDataParallel, TrainsLikeOneProcess) {
  for (int size = 1; size <= 4; ++size) {
    run_ranks(size, [](const comm::Group& world) {
      for (const Named& named : option_sets()) {
        expect_same_training(world, named, /*keeps_gradients=*/false);
      }
      expect_same_training(world, {"kept", {.gradient_as_bucket_view = true}}, true);
      expect_same_training(world, {"kept, copied", {}}, true);
    });
  }
}

TEST(DistributedDataParallel, TrainsLikeOneProcessOverGloo) {
  run_ranks(
      2,
      [](const comm::Group& world) {
        for (const Named& named : option_sets()) expect_same_training(world, named, false);
      },
      test_options(comm::Engine::kGloo));
}

TEST(DistributedDataParallel, CountsOneRankAsItsOwnWorld) {
  run_ranks(1, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world);
    loss_of(model(sample(1, {2, 5}))).backward();
    auto alone = std::make_shared<Layers>();
    loss_of(alone->forward(sample(1, {2, 5}))).backward();
    EXPECT_TRUE(net->scale.grad().equal(alone->scale.grad()));
  });
}

TEST(DistributedDataParallel, AddsUpWithoutSync) {
  run_ranks(2, [](const comm::Group& world) {
    for (const Named& named : option_sets()) {
      auto net = std::make_shared<Layers>();
      auto alone = std::make_shared<Layers>();
      DistributedDataParallel model(net, world, named.options);
      for (int step = 0; step < 6; ++step) {
        // Two local backwards, the very first ones too, then a synchronised one.
        for (int part = 0; part < 3; ++part) {
          for (int rank = 0; rank < 2; ++rank) {
            (loss_of(alone->forward(sample(100 * step + 10 * part + rank, {2, 5}))) / 2).backward();
          }
          const at::Tensor x = sample(100 * step + 10 * part + world.rank(), {2, 5});
          if (part < 2) {
            const auto scope = model.no_sync();
            const auto inner = model.no_sync();
            loss_of(model(x)).backward();
          } else {
            loss_of(model(x)).backward();
          }
        }
        expect_near(net->scale.grad(), alone->scale.grad(),
                    std::string(named.name) + ", step " + std::to_string(step));
        expect_near(net->layers[1]->weight.grad(), alone->layers[1]->weight.grad(), named.name);
        descend(*alone);
        descend(*net);
      }
    }
  });
}

TEST(DistributedDataParallel, DecidesAboutSyncInForward) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world);
    at::Tensor y = model(sample(world.rank(), {2, 5}));
    {
      const auto scope = model.no_sync();
      loss_of(y).backward();
    }
    auto alone = std::make_shared<Layers>();
    loss_of(alone->forward(at::cat({sample(0, {2, 5}), sample(1, {2, 5})}))).backward();
    expect_near(net->scale.grad(), alone->scale.grad(), "scale");
  });
}

TEST(DistributedDataParallel, MayDecideAboutSyncAfterForward) {
  run_ranks(2, [](const comm::Group& world) {
    for (const Named& named : option_sets()) {
      auto net = std::make_shared<Layers>();
      auto alone = std::make_shared<Layers>();
      DistributedDataParallel model(net, world, named.options);
      for (int step = 0; step < 4; ++step) {
        const auto scope = model.no_sync();
        for (int part = 0; part < 2; ++part) {
          at::Tensor y = model(sample(100 * step + 10 * part + world.rank(), {2, 5}));
          if (part == 1) model.replica().prepare_for_backward({y});
          loss_of(y).backward();
          for (int rank = 0; rank < 2; ++rank) {
            (loss_of(alone->forward(sample(100 * step + 10 * part + rank, {2, 5}))) / 2).backward();
          }
        }
        EXPECT_TRUE(model.replica().require_forward_param_sync());
        expect_near(net->scale.grad(), alone->scale.grad(), named.name);
        expect_near(net->layers[1]->weight.grad(), alone->layers[1]->weight.grad(), named.name);
        descend(*alone);
        descend(*net);
      }
    }
  });
}

struct Plan {
  int num_ranks, num_layers;
  Options options;
  std::vector<int> lengths;                          // iterations per rank
  std::vector<std::vector<std::vector<bool>>> used;  // [iteration][rank][layer]
  std::vector<bool> has_sync;                        // per iteration
};

Plan random_plan(std::mt19937& random) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Plan plan;
  plan.num_ranks = draw(1, 4);
  plan.num_layers = draw(1, 5);
  plan.options.find_unused_parameters = true;
  plan.options.gradient_as_bucket_view = draw(0, 1) == 1;
  if (draw(0, 1) == 1) plan.options.bucket_cap_mb = 0.0001 * draw(1, 20);
  int longest = 0;
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    plan.lengths.push_back(draw(0, 6));
    longest = std::max(longest, plan.lengths.back());
  }
  for (int step = 0; step < longest; ++step) {
    plan.has_sync.push_back(draw(0, 3) > 0);
    plan.used.emplace_back();
    for (int rank = 0; rank < plan.num_ranks; ++rank) {
      plan.used.back().emplace_back();
      for (int layer = 0; layer < plan.num_layers; ++layer) {
        plan.used.back().back().push_back(draw(0, 2) > 0);
      }
    }
  }
  return plan;
}

// What every rank's model is at the end, and nothing else: gradients add up on each rank until a
// synchronised iteration, in which the ranks that still have samples average theirs.
std::shared_ptr<Layers> plain_training(const Plan& plan) {
  auto net = std::make_shared<Layers>(plan.num_layers);
  const std::size_t count = net->parameters().size();
  std::vector<std::vector<at::Tensor>> local(plan.num_ranks, std::vector<at::Tensor>(count));
  for (std::size_t step = 0; step < plan.has_sync.size(); ++step) {
    std::vector<at::Tensor> sum(count);
    for (int rank = 0; rank < plan.num_ranks; ++rank) {
      if (static_cast<int>(step) >= plan.lengths[rank]) continue;
      clear_gradients(*net);
      loss_of(net->forward(sample(100 * step + rank, {2, 5}), plan.used[step][rank])).backward();
      const auto now = gradients(*net);
      for (std::size_t i = 0; i < count; ++i) {
        if (!now[i].defined()) continue;
        local[rank][i] = local[rank][i].defined() ? local[rank][i] + now[i] : now[i];
      }
      if (!plan.has_sync[step]) continue;
      for (std::size_t i = 0; i < count; ++i) {
        if (!local[rank][i].defined()) continue;
        sum[i] = sum[i].defined() ? sum[i] + local[rank][i] : local[rank][i];
      }
      local[rank].assign(count, {});
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (!sum[i].defined()) continue;
      net->parameters()[i].mutable_grad() = sum[i] / plan.num_ranks;
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (!sum[i].defined()) net->parameters()[i].mutable_grad() = at::Tensor();
    }
    descend(*net);
  }
  return net;
}

TEST(DistributedDataParallel, TrainsAnyModelAnyHowLikeThirtyLines) {
  std::mt19937 random(20261115);
  for (int trial = 0; trial < 60; ++trial) {
    const Plan plan = random_plan(random);
    const auto expected = plain_training(plan);
    run_ranks(plan.num_ranks, [&](const comm::Group& world) {
      auto net = std::make_shared<Layers>(plan.num_layers);
      DistributedDataParallel model(net, world, plan.options);
      model.join([&] {
        for (int step = 0; step < plan.lengths[world.rank()]; ++step) {
          std::optional<data_parallel::NoSync> scope;
          if (!plan.has_sync[step]) scope.emplace(model.replica());
          loss_of(model(sample(100 * step + world.rank(), {2, 5}), plan.used[step][world.rank()]))
              .backward();
          if (plan.has_sync[step]) descend(*net);
        }
      });
      const auto actual = net->parameters();
      const auto wanted = expected->parameters();
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        expect_near(actual[i].detach(), wanted[i].detach(), "trial " + std::to_string(trial));
      }
    });
    if (::testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace tessera::testing
