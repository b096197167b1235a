// Parameters that are ignored, shared, sparse, delayed or of an odd layout.

#include <gtest/gtest.h>

#include "data_parallel/models.h"
#include "tessera/comm/collectives.h"

namespace tessera::testing {
namespace {

TEST(DistributedDataParallel, LeavesIgnoredParametersAloneAtTheRootToo) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>(2, 5, 1 + world.rank());
    const at::Tensor scale = net->scale.detach().clone();
    DistributedDataParallel model(net, world, {.ignored = {"scale", "layer0.bias"}});
    EXPECT_TRUE(net->scale.equal(scale));
    EXPECT_EQ(model.replica().parameters().size(), 3U);
    loss_of(model(sample(world.rank(), {2, 5}))).backward();
    at::Tensor gradient = net->scale.grad().clone();
    comm::all_reduce_(gradient, world, comm::Reduction::kAvg);
    EXPECT_FALSE(gradient.allclose(net->scale.grad()));
  });
}

TEST(DistributedDataParallel, LetsIgnoredParametersDifferBetweenRanks) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    net->register_parameter("shard", at::ones({2 + world.rank()}));
    if (world.rank() == 1) net->register_parameter("other", at::ones({1}));
    DistributedDataParallel model(net, world, {.ignored = {"shard", "other"}});
    loss_of(model(sample(world.rank(), {2, 5}))).backward();
    EXPECT_EQ(net->named_parameters()["shard"].size(0), 2 + world.rank());
  });
}

TEST(DistributedDataParallel, CountsASharedParameterOnce) {
  struct Tied : torch::nn::Module {
    Tied() {
      a = register_module("a", std::make_shared<Part>(at::full({2}, 3.0)));
      b = register_module("b", std::make_shared<Part>(a->weight));
    }
    struct Part : torch::nn::Module {
      explicit Part(at::Tensor tensor) { weight = register_parameter("weight", std::move(tensor)); }
      at::Tensor weight;
    };
    at::Tensor forward(const at::Tensor& x) { return x * a->weight * b->weight; }
    std::shared_ptr<Part> a, b;
  };
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Tied>();
    DistributedDataParallel model(net, world);
    ASSERT_EQ(model.replica().parameters().size(), 1U);
    EXPECT_EQ(model.replica().parameters()[0].name, "a.weight");
    model(at::full({2}, world.rank() + 1.0)).sum().backward();
    EXPECT_EQ(net->a->weight.grad()[0].item<double>(), 9.0);  // 2 * 3 * (1 + 2) / 2
  });
}

TEST(DistributedDataParallel, ReducesSparseGradients) {
  struct Table : torch::nn::Module {
    Table() {
      table = register_module("table",
                              torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 2).sparse(true)));
      dense = register_module("dense", torch::nn::Linear(2, 2));
      fill(*this, 4);
    }
    at::Tensor forward(const at::Tensor& ids) { return dense(table(ids)); }
    torch::nn::Embedding table{nullptr};
    torch::nn::Linear dense{nullptr};
  };
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Table>();
    auto alone = std::make_shared<Table>();
    DistributedDataParallel model(net, world);
    for (int step = 0; step < 3; ++step) {
      const std::vector<std::int64_t> mine{world.rank(), 2, 5};
      const std::vector<std::int64_t> all{0, 2, 5, 1, 2, 5};
      model(at::tensor(mine, at::kLong)).square().mean().backward();
      alone->forward(at::tensor(all, at::kLong)).square().mean().backward();
      EXPECT_TRUE(net->table->weight.grad().is_sparse());
      expect_near(net->table->weight.grad().to_dense(), alone->table->weight.grad().to_dense(),
                  "table", 1e-6);
      expect_near(net->dense->weight.grad(), alone->dense->weight.grad(), "dense", 1e-6);
      descend(*net);
      descend(*alone);
    }
  });
}

TEST(DistributedDataParallel, DelaysParametersOfAnyType) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      first = register_parameter("first", at::full({3}, 2.0, at::kDouble));
      late = register_parameter("late", at::full({3}, 3.0, at::kDouble));
      half = register_parameter("half", at::full({2}, 4.0, at::kBFloat16));
    }
    at::Tensor forward(const at::Tensor& x) {
      return (x * first).sum() + (x * late).sum() + half.sum() * x.sum().to(at::kBFloat16);
    }
    at::Tensor first, late, half;
  };
  run_ranks(2, [](const comm::Group& world) {
    for (const bool is_all : {false, true}) {
      auto net = std::make_shared<Mixed>();
      Options options{.delay_all_reduce_named_params = {"late", "half"},
                      .param_to_hook_all_reduce = "first"};
      if (is_all) options.delay_all_reduce_named_params.push_back("first");
      DistributedDataParallel model(net, world, options);
      for (int step = 0; step < 3; ++step) {
        clear_gradients(*net);
        model(at::full({3}, world.rank() + 1.0, at::kDouble)).backward();
        EXPECT_EQ(net->late.grad()[0].item<double>(), 1.5);
        EXPECT_EQ(net->first.grad()[0].item<double>(), 1.5);
        EXPECT_EQ(net->half.grad()[0].item<double>(), 4.5);
      }
      clear_gradients(*net);
      {
        const auto scope = model.no_sync();
        model(at::full({3}, world.rank() + 1.0, at::kDouble)).backward();
      }
      EXPECT_EQ(net->late.grad()[0].item<double>(), world.rank() + 1.0);
    }
  });
}

TEST(DistributedDataParallel, KeepsStridesAndComplexNumbers) {
  struct Odd : torch::nn::Module {
    Odd() {
      strided = register_parameter(
          "strided", sample(1, {2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
      complex = register_parameter("complex", at::complex(sample(2, {3}), sample(3, {3})));
      empty = register_parameter("empty", at::zeros({0, 3}, at::kDouble));
    }
    at::Tensor forward(const at::Tensor& x) {
      return (strided * x).square().sum() + at::real(complex * at::conj(complex)).sum() * x.sum() +
             empty.sum();
    }
    at::Tensor strided, complex, empty;
  };
  run_ranks(2, [](const comm::Group& world) {
    for (const bool is_view : {false, true}) {
      auto net = std::make_shared<Odd>();
      auto alone = std::make_shared<Odd>();
      DistributedDataParallel model(net, world, {.gradient_as_bucket_view = is_view});
      for (int step = 0; step < 3; ++step) {
        clear_gradients(*net);
        clear_gradients(*alone);
        model(sample(world.rank(), {2, 3, 4, 5})).backward();
        for (int rank = 0; rank < 2; ++rank) {
          (alone->forward(sample(rank, {2, 3, 4, 5})) / 2).backward();
        }
        EXPECT_TRUE(net->strided.grad().is_contiguous(at::MemoryFormat::ChannelsLast));
        expect_near(net->strided.grad(), alone->strided.grad(), "strided");
        expect_near(at::view_as_real(net->complex.grad()), at::view_as_real(alone->complex.grad()),
                    "complex", 1e-11);
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing
