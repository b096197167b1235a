// Backwards that an exception ends, on all ranks or on some.

#include <gtest/gtest.h>

#include "data_parallel/models.h"
#include "tessera/comm/error.h"

namespace tessera::testing {
namespace {

// Throws once, when the gradient of `parameter` is there.
void throw_at(const at::Tensor& parameter) {
  auto has_thrown = std::make_shared<bool>(false);
  parameter.register_hook([has_thrown](const at::Tensor& gradient) -> at::Tensor {
    if (!std::exchange(*has_thrown, true)) throw std::runtime_error("half-way");
    return gradient;
  });
}

TEST(CutBackward, OnSomeRanksIsAnErrorOnAll) {
  for (const auto engine : {comm::Engine::kShm, comm::Engine::kGloo}) {
    const auto errors = run_ranks_collecting(
        3,
        [](const comm::Group& world) {
          auto net = std::make_shared<Layers>();
          DistributedDataParallel model(net, world);
          loss_of(model(sample(world.rank(), {2, 5}))).backward();
          if (world.rank() == 1) throw_at(net->layers[2]->weight);
          const auto step = [&] { loss_of(model(sample(world.rank(), {2, 5}))).backward(); };
          if (world.rank() == 1) {
            EXPECT_THROW(step(), std::runtime_error);
          }
          // Without the check, these gradients of rank 1 meet those of the step before.
          step();
        },
        test_options(engine));
    for (int rank = 0; rank < 3; ++rank) {
      const std::string text = text_of(errors[rank]);
      EXPECT_NE(text.find("rank 1 called all_gather of int64, ranks 0, 2 called all_reduce"),
                std::string::npos)
          << text;
      const bool is_explained = text.starts_with(
          "DistributedDataParallel: an exception ended the backward on rank 1 after 0 of 1 "
          "buckets, but not at the same place on all ranks. Their gradients do not belong together "
          "any more: end the job, or go on in another group. comm.all_");
      EXPECT_EQ(is_explained, rank == 1) << text;
    }
  }
}

TEST(CutBackward, AtDifferentPlacesIsAnErrorOnAll) {
  const auto errors = run_ranks_collecting(2, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world, {.bucket_cap_mb = 0.0001});
    const auto step = [&] { loss_of(model(sample(world.rank(), {2, 5}))).backward(); };
    step();
    step();
    throw_at(world.rank() == 0 ? net->layers[2]->weight : net->layers[0]->weight);
    try {
      step();
    } catch (const std::runtime_error&) {
    }
    step();
  });
  EXPECT_TRUE(text_of(errors[0]).starts_with(
      "DistributedDataParallel: an exception ended the backward on rank 0 after 0 of 4 buckets, "
      "but not at the same place on all ranks."))
      << text_of(errors[0]);
  EXPECT_NE(text_of(errors[1]).find("rank 0 called all_gather of int64"), std::string::npos)
      << text_of(errors[1]);
}

TEST(CutBackward, OfAllRanksIsForgotten) {
  for (const bool is_view : {false, true}) {
    run_ranks(3, [is_view](const comm::Group& world) {
      auto net = std::make_shared<Layers>();
      DistributedDataParallel model(net, world,
                                    {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = is_view});
      const auto step = [&] { loss_of(model(sample(world.rank(), {2, 5}))).backward(); };
      step();
      step();
      throw_at(net->layers[0]->weight);
      EXPECT_THROW(step(), std::runtime_error);
      {
        // One rank may evaluate in between.
        at::NoGradGuard no_grad;
        if (world.rank() == 0) model(sample(0, {2, 5}));
      }
      clear_gradients(*net);
      step();
      auto alone = std::make_shared<Layers>();
      for (int rank = 0; rank < 3; ++rank) {
        (loss_of(alone->forward(sample(rank, {2, 5}))) / 3).backward();
      }
      expect_near(net->scale.grad(), alone->scale.grad(), "scale");
    });
  }
}

}  // namespace
}  // namespace tessera::testing
