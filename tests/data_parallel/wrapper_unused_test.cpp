// What a forward returns, and parameters that the loss does not depend on.

#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/optim/sgd.h>

#include "data_parallel/models.h"
#include "tessera/comm/collectives.h"

namespace tessera::testing {
namespace {

// ---- what a forward may return ----

struct Pair {
  at::Tensor a;
  std::vector<std::optional<at::Tensor>> more;
  template <class Visitor>
  void visit_tensors(Visitor&& visitor) {
    data_parallel::for_each_tensor(a, visitor);
    data_parallel::for_each_tensor(more, visitor);
  }
};

template <class Result>
struct Returning : torch::nn::Module {
  explicit Returning(std::function<Result(at::Tensor)> wrap) : wrap(std::move(wrap)) {
    layer = register_module("layer", torch::nn::Linear(3, 3));
    fill(*this, 3);
  }
  Result forward(const at::Tensor& x, int times, const std::string&) {
    return wrap(layer(x) * times);
  }
  std::function<Result(at::Tensor)> wrap;
  torch::nn::Linear layer{nullptr};
};

template <class Result>
void expect_wraps(const comm::Group& world, std::function<Result(at::Tensor)> wrap,
                  std::function<at::Tensor(Result&)> unwrap) {
  auto net = std::make_shared<Returning<Result>>(std::move(wrap));
  DistributedDataParallel model(net, world, {.find_unused_parameters = true});
  Result result = model(at::full({2, 3}, world.rank() + 1.0), 2, "words");
  unwrap(result).sum().backward();
  // d/dw = 2 * sum over rows of x, averaged over x = 1 and x = 2.
  expect_near(net->layer->weight.grad(), at::full({3, 3}, 6.0), "weight", 1e-6);
}

TEST(DistributedDataParallel, FindsTensorsInWhateverForwardReturns) {
  run_ranks(2, [](const comm::Group& world) {
    using at::Tensor;
    expect_wraps<Tensor>(world, [](Tensor y) { return y; }, [](Tensor& r) { return r; });
    expect_wraps<std::tuple<int, Tensor, std::string>>(
        world, [](Tensor y) { return std::make_tuple(1, y, std::string("s")); },
        [](auto& r) { return std::get<1>(r); });
    expect_wraps<std::map<std::string, std::optional<Tensor>>>(
        world,
        [](Tensor y) {
          return std::map<std::string, std::optional<Tensor>>{{"y", y}, {"none", std::nullopt}};
        },
        [](auto& r) { return *r["y"]; });
    expect_wraps<std::unordered_map<int, std::pair<Tensor, double>>>(
        world,
        [](Tensor y) { return std::unordered_map<int, std::pair<Tensor, double>>{{3, {y, 1.5}}}; },
        [](auto& r) { return r[3].first; });
    expect_wraps<std::array<std::vector<Tensor>, 2>>(
        world,
        [](Tensor y) { return std::array<std::vector<Tensor>, 2>{std::vector<Tensor>{y}, {}}; },
        [](auto& r) { return r[0][0]; });
    expect_wraps<Pair>(
        world, [](Tensor y) { return Pair{at::Tensor(), {std::nullopt, y}}; },
        [](Pair& r) { return *r.more[1]; });
    expect_wraps<c10::IValue>(
        world,
        [](Tensor y) {
          c10::Dict<std::string, c10::List<Tensor>> inner;
          inner.insert("y", c10::List<Tensor>({y}));
          return c10::IValue(c10::ivalue::Tuple::create({c10::IValue(inner), c10::IValue(3)}));
        },
        [](c10::IValue& r) {
          return r.toTupleRef().elements()[0].toGenericDict().at("y").toTensorList().get(0);
        });
  });
}

// ---- parameters that are not used ----

// Returns nothing to see: whoever wants the loss asks the module.
struct KeepingItsLoss : torch::nn::Module {
  KeepingItsLoss() {
    layer = register_module("layer", torch::nn::Linear(3, 3));
    fill(*this, 3);
  }
  void forward(const at::Tensor& x) { loss = layer(x).sum(); }
  at::Tensor loss;
  torch::nn::Linear layer{nullptr};
};

TEST(DistributedDataParallel, LearnsAStaticGraphFromALossItDoesNotSee) {
  run_ranks(2, [](const comm::Group& world) {
    for (const bool is_view : {false, true}) {
      auto net = std::make_shared<KeepingItsLoss>();
      DistributedDataParallel model(net, world,
                                    {.static_graph = true, .gradient_as_bucket_view = is_view});
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int step = 1; step <= 4; ++step) {
        optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
        model(at::full({2, 3}, step * (world.rank() + 1.0)));
        net->loss.backward();
        // Two rows of step and of 2 * step, averaged.
        expect_near(net->layer->weight.grad(), at::full({3, 3}, 3.0 * step), "weight", 1e-6);
      }
    }
  });
}

TEST(DistributedDataParallel, LeavesGradientsThatNobodyUsed) {
  run_ranks(3, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world, {.find_unused_parameters = true});
    // Layer 0 nowhere, layer 1 on rank 1 only, layer 2 everywhere.
    loss_of(model(sample(world.rank(), {2, 5}), std::vector<bool>{false, world.rank() == 1, true}))
        .backward();
    EXPECT_FALSE(net->layers[0]->weight.grad().defined());
    ASSERT_TRUE(net->layers[1]->weight.grad().defined());
    auto alone = std::make_shared<Layers>();
    loss_of(alone->forward(sample(1, {2, 5}), std::vector<bool>{false, true, true})).backward();
    expect_near(net->layers[1]->weight.grad(), alone->layers[1]->weight.grad() / 3, "layer 1");
  });
}

struct TwoHeads : torch::nn::Module {
  TwoHeads() {
    trunk = register_module("trunk", torch::nn::Linear(4, 4));
    left = register_module("left", torch::nn::Linear(4, 2));
    right = register_module("right", torch::nn::Linear(4, 2));
    fill(*this, 5);
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor h = at::tanh(trunk(x));
    return {left(h), right(h)};
  }
  torch::nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr};
};

TEST(DistributedDataParallel, CopiesOutputsUnlessToldNotTo) {
  run_ranks(2, [](const comm::Group& world) {
    for (const bool copies : {true, false}) {
      at::Tensor inside;
      auto net = std::make_shared<Returning<at::Tensor>>([&](at::Tensor y) { return inside = y; });
      DistributedDataParallel model(net, world, {.find_unused_parameters = true});
      model.replica().set_sink_clone(copies);
      const at::Tensor y = model(at::full({2, 3}, world.rank() + 1.0), 2, "words");
      EXPECT_EQ(y.is_alias_of(inside), !copies);
      y.sum().backward();
      expect_near(net->layer->weight.grad(), at::full({3, 3}, 6.0), "weight", 1e-6);
    }
  });
}

TEST(DistributedDataParallel, LetsAnOutputBeIgnored) {
  run_ranks(2, [](const comm::Group& world) {
    for (const bool is_static : {false, true}) {
      auto net = std::make_shared<TwoHeads>();
      auto alone = std::make_shared<TwoHeads>();
      Options options{.bucket_cap_mb = 0.00005};
      (is_static ? options.static_graph : options.find_unused_parameters) = true;
      DistributedDataParallel model(net, world, options);
      for (int step = 0; step < 5; ++step) {
        clear_gradients(*alone);
        clear_gradients(*net);
        const at::Tensor x = sample(10 * step, {3, 4}, at::kFloat);
        alone->forward(x).first.sum().backward();
        model(x).first.sum().backward();
        expect_near(net->trunk->weight.grad(), alone->trunk->weight.grad(), "trunk", 1e-6);
        EXPECT_FALSE(net->right->weight.grad().defined());
      }
    }
  });
}

TEST(DistributedDataParallel, NamesWhatGotNoGradientWhenBackwardEnds) {
  const auto errors = run_ranks_collecting(2, [](const comm::Group& world) {
    DistributedDataParallel model(std::make_shared<TwoHeads>(), world);
    auto heads = model(sample(1, {3, 4}, at::kFloat));
    heads.second = at::Tensor();
    struct OneHead : TwoHeads {
      at::Tensor forward(const at::Tensor& x) { return left(at::tanh(trunk(x))); }
    };
    DistributedDataParallel one(std::make_shared<OneHead>(), world);
    one(sample(1, {3, 4}, at::kFloat)).sum().backward();
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_NE(text_of(errors[rank])
                  .find("Expected to have finished reduction in this iteration, "
                        "but on rank " +
                        std::to_string(rank) + " 2 of 6 parameters of "),
              std::string::npos)
        << text_of(errors[rank]);
    EXPECT_NE(text_of(errors[rank])
                  .find("got no gradient in backward. Parameters which did not receive grad for "
                        "rank " +
                        std::to_string(rank) +
                        ": right.weight, right.bias (numbers 4 5). If the loss is not meant"),
              std::string::npos)
        << text_of(errors[rank]);
  }
}

TEST(DistributedDataParallel, WaitsForTheSecondBackwardOfAForward) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<TwoHeads>();
    auto alone = std::make_shared<TwoHeads>();
    // The trunk gets its gradient in the second backward: only the first head's parameters before.
    DistributedDataParallel model(net, world);
    const at::Tensor x = sample(1, {3, 4}, at::kFloat);
    auto [left, right] = model(x);
    const std::vector<at::Tensor> inputs{net->left->weight, net->left->bias};
    left.sum().backward({}, /*retain_graph=*/true, /*create_graph=*/false, inputs);
    right.sum().backward();
    auto [a, b] = alone->forward(x);
    b.sum().backward();
    expect_near(net->trunk->weight.grad(), alone->trunk->weight.grad(), "trunk", 1e-6);
  });
}

TEST(DistributedDataParallel, GoesOnAfterAnUnfinishedOrBrokenBackward) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world);
    EXPECT_THROW(loss_of(model(sample(1, {2, 5}), std::vector<bool>{true, false, true})).backward(),
                 c10::Error);
    clear_gradients(*net);
    // An exception of the user's own, half-way through backward.
    at::Tensor y = model(sample(1, {2, 5}));
    net->layers[0]->weight.register_hook([](const at::Tensor& g) -> at::Tensor {
      static thread_local bool has_thrown = false;
      if (!has_thrown) {
        has_thrown = true;
        throw std::runtime_error("half-way");
      }
      return g;
    });
    EXPECT_THROW(loss_of(y).backward(), std::runtime_error);
    clear_gradients(*net);
    loss_of(model(sample(world.rank(), {2, 5}))).backward();
    auto alone = std::make_shared<Layers>();
    loss_of(alone->forward(at::cat({sample(0, {2, 5}), sample(1, {2, 5})}))).backward();
    expect_near(net->scale.grad(), alone->scale.grad(), "scale");
  });
}

TEST(DistributedDataParallel, SkipsBucketsNobodyUses) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world,
                                  {.bucket_cap_mb = 0.0001,
                                   .find_unused_parameters = true,
                                   .skip_all_reduce_unused_params = true});
    for (int step = 0; step < 3; ++step) {
      clear_gradients(*net);
      loss_of(model(sample(world.rank(), {2, 5}), std::vector<bool>{true, false, true})).backward();
      EXPECT_FALSE(net->layers[1]->weight.grad().defined());
    }
    auto alone = std::make_shared<Layers>();
    loss_of(alone->forward(at::cat({sample(0, {2, 5}), sample(1, {2, 5})}),
                           std::vector<bool>{true, false, true}))
        .backward();
    expect_near(net->scale.grad(), alone->scale.grad(), "scale");
  });
}

TEST(DistributedDataParallel, ChoosesHowToLookForUnusedParameters) {
  run_ranks(2, [](const comm::Group& world) {
    const auto train = [&](const std::function<std::vector<bool>(int)>& used) {
      auto net = std::make_shared<Layers>();
      DistributedDataParallel model(net, world, {.automatic_graph = true});
      EXPECT_TRUE(model.replica().options().find_unused_parameters);
      for (int step = 0; step < 9; ++step) {
        clear_gradients(*net);
        loss_of(model(sample(step * 2 + world.rank(), {2, 5}), used(step))).backward();
        auto alone = std::make_shared<Layers>();
        for (int rank = 0; rank < 2; ++rank) {
          (loss_of(alone->forward(sample(step * 2 + rank, {2, 5}), used(step))) / 2).backward();
        }
        const auto expected = gradients(*alone);
        const auto actual = gradients(*net);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          expect_near(actual[i], expected[i], "step " + std::to_string(step));
        }
      }
      const Options& options = model.replica().options();
      return std::make_pair(options.find_unused_parameters, options.static_graph);
    };
    EXPECT_EQ(train([](int) { return std::vector<bool>{true, true, true}; }),
              std::make_pair(false, false));
    EXPECT_EQ(train([](int) { return std::vector<bool>{true, false, true}; }),
              std::make_pair(false, true));
    EXPECT_EQ(train([](int step) { return std::vector<bool>{true, step % 2 == 0, true}; }),
              std::make_pair(true, false));
  });
}

}  // namespace
}  // namespace tessera::testing
