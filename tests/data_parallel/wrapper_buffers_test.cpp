// Buffers: whose values count, and when they are sent.

#include <gtest/gtest.h>

#include "data_parallel/models.h"
#include "tessera/comm/collectives.h"

namespace tessera::testing {
namespace {

TEST(DistributedDataParallel, SendsBuffersOfRankZero) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Counting>();
    net->mean.fill_(world.rank() + 1.0);
    DistributedDataParallel model(net, world);
    EXPECT_EQ(net->mean[0].item<double>(), 1.0);
    model(at::full({2, 3}, 8.0 * world.rank())).sum().backward();
    EXPECT_EQ(net->mean[0].item<double>(), world.rank() == 0 ? 0.5 : 4.5);
    model(at::full({2, 3}, 2.0)).sum().backward();  // rank 0's 0.5 counted on both
    EXPECT_EQ(net->mean[0].item<double>(), 1.25);

    auto local = std::make_shared<Counting>();
    local->mean.fill_(world.rank() + 1.0);
    DistributedDataParallel kept(local, world, {.broadcast_buffers = false});
    EXPECT_EQ(local->mean[0].item<double>(), world.rank() + 1.0);
    DistributedDataParallel once(local, world, {.forward_sync_buffers = false});
    EXPECT_EQ(local->mean[0].item<double>(), 1.0);
  });
}

TEST(DistributedDataParallel, KeepsVersionsOfBuffersItSends) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Counting>();
    net->eval();
    DistributedDataParallel model(net, world);
    at::Tensor mean = net->mean;
    const auto before = mean._version();
    at::Tensor first = model(at::ones({2, 3}).requires_grad_()) * mean;
    at::Tensor second = model(at::ones({2, 3})) * mean;
    EXPECT_EQ(mean._version(), before);
    (first + second).sum().backward();
  });
}

TEST(DistributedDataParallel, LetsOneRankEvaluateAlone) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Counting>();
    DistributedDataParallel model(net, world);
    for (int step = 0; step < 3; ++step) {
      model(at::ones({2, 3})).sum().backward();
      if (world.rank() == 0) {
        at::NoGradGuard no_grad;
        model.eval();
        for (int batch = 0; batch <= step; ++batch) model(at::ones({2, 3}));
        model.train();
      }
      comm::barrier(world);
    }
  });
}

TEST(DistributedDataParallel, SendsBuffersWhenAsked) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Counting>();
    DistributedDataParallel model(net, world);
    model(at::full({2, 3}, 8.0 * world.rank())).sum().backward();
    const double own = net->mean[0].item<double>();
    EXPECT_EQ(own == 0, world.rank() == 0);
    model.sync_buffers();
    EXPECT_EQ(net->mean[0].item<double>(), 0.0);

    int num_calls = 0;
    model.replica().register_buffer_hook([&](const auto& buffers) {
      ++num_calls;
      EXPECT_TRUE(buffers.contains("mean"));
      return std::vector<c10::intrusive_ptr<c10::ivalue::Future>>();
    });
    model.sync_buffers();
    EXPECT_EQ(num_calls, 1);
  });
}

TEST(DistributedDataParallel, RunsABufferHookInstead) {
  run_ranks(2, [](const comm::Group& world) {
    for (const auto place : {data_parallel::BufferHookPlace::kPreForward,
                             data_parallel::BufferHookPlace::kPostForward}) {
      auto net = std::make_shared<Counting>();
      DistributedDataParallel model(net, world);
      int num_calls = 0;
      model.replica().register_buffer_hook(
          [&](const std::map<std::string, at::Tensor>& buffers) {
            ++num_calls;
            EXPECT_EQ(buffers.size(), 2U);
            std::vector<at::Tensor> mean{buffers.at("mean")};
            auto future = world.process_group()->allreduce(mean)->getFuture();
            // The forward that follows changes the buffer itself.
            if (place == data_parallel::BufferHookPlace::kPreForward) future->wait();
            return std::vector<data_parallel::FuturePtr>{future};
          },
          place);
      model(at::full({2, 3}, 2.0 * world.rank())).sum().backward();
      EXPECT_EQ(num_calls, 1);
      // After: 0 + 1; before: 0 + 0, then this rank's own.
      const double expected =
          place == data_parallel::BufferHookPlace::kPostForward ? 1.0 : world.rank();
      EXPECT_EQ(net->mean[0].item<double>(), expected);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
