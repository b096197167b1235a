// The wrapper against one process that sees all samples.

#include <gtest/gtest.h>
#include <torch/version.h>

#include <atomic>
#include <random>

#include <ATen/core/ivalue.h>
#include <torch/nn/functional/embedding.h>

#include "data_parallel/models.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/comm/mesh.h"

namespace tessera::testing {
namespace {

using data_parallel::JoinOptions;
using data_parallel::MeshAxes;
using data_parallel::Replica;

struct Named {
  const char* name;
  Options options;
};

std::vector<Named> option_sets() {
  return {
      {"plain", {}},
      {"view", {.gradient_as_bucket_view = true}},
      {"small buckets", {.bucket_cap_mb = 0.0003}},
      {"small buckets, view", {.bucket_cap_mb = 0.0003, .gradient_as_bucket_view = true}},
      {"bucket list", {.bucket_cap_mb_list = {0.0001, 0.0005}}},
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
      {"batched", {.batched_grad_copy = true}},
#endif
      {"find unused", {.find_unused_parameters = true}},
      {"static", {.bucket_cap_mb = 0.0003, .static_graph = true}},
      {"automatic", {.automatic_graph = true}},
  };
}

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
                  .find("got no gradient in backward: right.weight, right.bias. "
                        "If the loss is not meant"),
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

// ---- no_sync ----

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

// ---- buffers ----

struct Counting : torch::nn::Module {
  Counting() {
    weight = register_parameter("weight", at::ones({3}));
    mean = register_buffer("mean", at::zeros({3}));
    count = register_buffer("count", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) {
      at::NoGradGuard no_grad;
      mean = named_buffers()["mean"];
      mean.mul_(0.5).add_(x.mean(0), 0.5);
      count.add_(1);
    }
    return (x - mean) * weight;
  }
  at::Tensor weight, mean, count;
};

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

// ---- the models differ ----

std::string mismatch(const std::function<std::shared_ptr<Layers>(int)>& make,
                     const std::function<Options(int)>& options, comm::Engine engine) {
  const auto errors = run_ranks_collecting(
      3,
      [&](const comm::Group& world) {
        DistributedDataParallel model(make(world.rank()), world, options(world.rank()));
      },
      test_options(engine));
  const std::string text = text_of(errors[0]);
  for (const auto& error : errors) {
    EXPECT_EQ(text_of(error), text);
    try {
      std::rethrow_exception(error);
    } catch (const comm::Error& caught) {
      EXPECT_EQ(caught.kind(), comm::ErrorKind::kMismatch);
    } catch (...) {
      ADD_FAILURE() << "not a comm::Error: " << text;
    }
  }
  return text;
}

TEST(DistributedDataParallel, SaysOnAllRanksHowModelsDiffer) {
  const auto same = [](int) { return std::make_shared<Layers>(); };
  const auto plain = [](int) { return Options{}; };
  for (const auto engine : {comm::Engine::kShm, comm::Engine::kGloo}) {
    EXPECT_EQ(mismatch([](int rank) { return std::make_shared<Layers>(rank == 1 ? 2 : 3); }, plain,
                       engine),
              "DistributedDataParallel expects the same model and options on all ranks, but:\n"
              "  parameter 5: 'layer2.weight' Double [5, 5] on ranks 0, 2; none on rank 1\n"
              "  parameter 6: 'layer2.bias' Double [5] on ranks 0, 2; none on rank 1\n"
              "Nothing was sent yet. Build the same model on every rank.");
    EXPECT_NE(mismatch(
                  [](int rank) {
                    auto net = std::make_shared<Layers>();
                    if (rank == 2) net->to(at::kFloat);
                    return net;
                  },
                  plain, engine)
                  .find("parameter 0: 'scale' Double [5] on ranks 0, 1; 'scale' Float [5] on rank "
                        "2\n"),
              std::string::npos);
    EXPECT_NE(mismatch(
                  [](int rank) {
                    auto net = std::make_shared<Layers>();
                    if (rank == 1) net->scale.requires_grad_(false);
                    return net;
                  },
                  plain, engine)
                  .find("'scale' Double [5] without gradient on rank 1"),
              std::string::npos);
    EXPECT_NE(
        mismatch(
            same, [](int rank) { return Options{.find_unused_parameters = rank == 0}; }, engine)
            .find("option: find_unused_parameters = true on rank 0; find_unused_parameters = "
                  "false on ranks 1, 2"),
        std::string::npos);
    EXPECT_NE(mismatch(
                  [](int rank) {
                    auto net = std::make_shared<Layers>();
                    if (rank == 2) net->register_buffer("extra", at::zeros({2}));
                    return net;
                  },
                  plain, engine)
                  .find("buffer 0: none on ranks 0, 1; 'extra' Float [2] on rank 2"),
              std::string::npos);
  }
}

// ---- arguments ----

std::string error_of(const std::function<void(const comm::Group&)>& body) {
  return text_of(run_ranks_collecting(1, body)[0]);
}

TEST(DistributedDataParallel, ChecksItsArgumentsInOrder) {
  const auto with = [](Options options) {
    return error_of([&](const comm::Group& world) {
      DistributedDataParallel model(std::make_shared<Layers>(), world, options);
    });
  };
  // Everything is wrong; the first check counts, then the next.
  Options wrong;
  wrong.delay_all_reduce_named_params = {"scale"};
  wrong.device_ids = {c10::Device("cuda:0"), c10::Device("cuda:1")};
  wrong.bucket_cap_mb = -1;
  EXPECT_EQ(with(wrong),
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
            "time.");
  wrong.delay_all_reduce_named_params.clear();
  for (int i = 0; i < 3; ++i) {
    wrong.ignored.push_back("layer" + std::to_string(i) + ".weight");
    wrong.ignored.push_back("layer" + std::to_string(i) + ".bias");
  }
  wrong.ignored.push_back("scale");
  EXPECT_EQ(with(wrong),
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient.");
  wrong.ignored.clear();
  EXPECT_EQ(with(wrong), "device_ids can only be None or contain a single element.");
  wrong.device_ids.pop_back();
  EXPECT_EQ(with(wrong),
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got device_ids of 1, "
            "output_device none, and module parameters {cpu}.");
  wrong.device_ids.clear();
  EXPECT_EQ(with(wrong), "DistributedDataParallel: bucket_cap_mb is -1, it must be positive.");
  EXPECT_EQ(with({.bucket_cap_mb_list = {1, 0}}),
            "DistributedDataParallel: bucket_cap_mb_list contains 0, sizes must be positive.");
  EXPECT_EQ(with({.bucket_cap_mb = 1, .bucket_cap_mb_list = {1}}),
            "DistributedDataParallel: give bucket_cap_mb or bucket_cap_mb_list, not both.");
  EXPECT_EQ(with({.divisor = 0}),
            "DistributedDataParallel: the divisor is 0, it must be positive.");
  EXPECT_EQ(
      with({.delay_all_reduce_named_params = {"nobody"}, .param_to_hook_all_reduce = "scale"}),
      "DistributedDataParallel: delay_all_reduce_named_params names 'nobody', which is no "
      "parameter.");
  EXPECT_EQ(
      with({.delay_all_reduce_named_params = {"scale"}, .param_to_hook_all_reduce = "nobody"}),
      "DistributedDataParallel: param_to_hook_all_reduce names 'nobody', which is no "
      "parameter.");
  EXPECT_EQ(error_of([](const comm::Group& world) {
              DistributedDataParallel model(std::shared_ptr<Layers>(), world);
            }),
            "DistributedDataParallel: the module is null.");
  EXPECT_EQ(error_of([](const comm::Group& world) {
              data_parallel::ModelParts parts;
              parts.parameters.push_back({"w", at::ones({2}).requires_grad_() * 2});
              Replica replica(parts, world);
            }),
            "DistributedDataParallel: 'w' is the result of a computation; a parameter must be a "
            "leaf.");
  EXPECT_EQ(error_of([](const comm::Group& world) {
              data_parallel::ModelParts parts;
              parts.has_sync_batch_norm = true;
              parts.parameters.push_back({"w", at::ones({2}).requires_grad_()});
              Replica replica(parts, world);
            }),
            "SyncBatchNorm layers only work with GPU modules");
}

TEST(DistributedDataParallel, NoticesALateGradient) {
  EXPECT_EQ(error_of([](const comm::Group& world) {
              auto net = std::make_shared<Layers>();
              net->scale.requires_grad_(false);
              DistributedDataParallel model(net, world);
              net->scale.requires_grad_(true);
              model(sample(1, {2, 5}));
            }),
            "DistributedDataParallel: 'scale' did not require a gradient when the module was "
            "wrapped, and does now. Its gradient would stay local; wrap the module again.");
}

TEST(DistributedDataParallel, WarnsWhenAModuleIsWrappedTwice) {
  struct Collector : c10::WarningHandler {
    void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
    std::vector<std::string> texts;
  };
  run_ranks(1, [](const comm::Group& world) {
    Collector collector;
    c10::WarningUtils::WarningHandlerGuard guard(&collector);
    auto net = std::make_shared<Layers>();
    DistributedDataParallel first(net, world);
    EXPECT_TRUE(collector.texts.empty());
    DistributedDataParallel second(net, world);
    ASSERT_EQ(collector.texts.size(), 1U);
    EXPECT_EQ(collector.texts[0],
              "DistributedDataParallel: 'scale' is wrapped already by another "
              "DistributedDataParallel that is still alive. Its gradient would be reduced twice; "
              "let go of the other one first.");
  });
}

// ---- parameters apart ----

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

// ---- hooks, groups, reports ----

struct Doubling : data_parallel::CommHook {
  data_parallel::FuturePtr reduce(data_parallel::Bucket& bucket) override {
    if (throws) throw std::runtime_error("the hook is not in the mood");
    indices.push_back(bucket.index());
    if (bucket.is_last()) ++num_last;
    for (const auto& name : bucket.names()) names.push_back(name);
    divisor = bucket.divisor();
    std::vector<at::Tensor> buffer{bucket.buffer().mul_(2 / bucket.divisor())};
    return bucket.group().process_group()->allreduce(buffer)->getFuture();
  }
  void end_step() override { ++num_steps; }
  std::string name() const override { return "doubling"; }
  bool throws = false;
  std::vector<std::size_t> indices;
  std::vector<std::string> names;
  int num_last = 0, num_steps = 0;
  double divisor = 0;
};

TEST(DistributedDataParallel, GivesBucketsToAHook) {
  for (const int size : {1, 2}) {
    run_ranks(size, [](const comm::Group& world) {
      for (const bool is_static : {false, true}) {
        auto net = std::make_shared<Layers>();
        auto alone = std::make_shared<Layers>();
        DistributedDataParallel model(net, world,
                                      {.bucket_cap_mb = 0.0003, .static_graph = is_static});
        auto hook = std::make_shared<Doubling>();
        model.register_comm_hook(hook);
        EXPECT_THROW(model.register_comm_hook(hook), c10::Error);
        for (int step = 0; step < 4; ++step) {
          clear_gradients(*net);
          hook->indices.clear();
          hook->names.clear();
          loss_of(model(sample(1, {2, 5}))).backward();
          EXPECT_EQ(hook->names.size(), 7U);
          for (std::size_t i = 0; i < hook->indices.size(); ++i) EXPECT_EQ(hook->indices[i], i);
          EXPECT_EQ(hook->num_last, step + 1);
          EXPECT_EQ(hook->num_steps, step + 1);
        }
        EXPECT_GT(hook->indices.size(), 1U);
        loss_of(alone->forward(sample(1, {2, 5}))).backward();
        expect_near(net->scale.grad(), alone->scale.grad() * 2, "scale");
        EXPECT_EQ(model.replica().logging_data().strings["comm_hook"], "doubling");
      }
    });
  }
}

TEST(DistributedDataParallel, GoesOnAfterAHookThrew) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world);
    auto hook = std::make_shared<Doubling>();
    model.register_comm_hook(hook);
    loss_of(model(sample(1, {2, 5}))).backward();
    hook->throws = true;
    try {
      loss_of(model(sample(1, {2, 5}))).backward();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_STREQ(error.what(), "the hook is not in the mood");
    }
    hook->throws = false;
    clear_gradients(*net);
    loss_of(model(sample(1, {2, 5}))).backward();
    auto alone = std::make_shared<Layers>();
    loss_of(alone->forward(sample(1, {2, 5}))).backward();
    expect_near(net->scale.grad(), alone->scale.grad() * 2, "scale");
  });
}

TEST(DistributedDataParallel, MovesToAnotherGroup) {
  run_ranks(3, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world);
    loss_of(model(sample(1, {2, 5}))).backward();
    const auto pair = world.subgroup({0, 2}, "pair");
    if (!pair) return;
    model.replica().update_process_group(*pair);
    for (int step = 0; step < 3; ++step) {
      clear_gradients(*net);
      loss_of(model(sample(pair->rank(), {2, 5}))).backward();
    }
    auto alone = std::make_shared<Layers>();
    loss_of(alone->forward(at::cat({sample(0, {2, 5}), sample(1, {2, 5})}))).backward();
    expect_near(net->scale.grad(), alone->scale.grad(), "scale");
  });
}

TEST(DistributedDataParallel, SumsOverPartsAndAveragesOverSamples) {
  run_ranks(4, [](const comm::Group& world) {
    const comm::Mesh mesh(world, {{"data", 2}, {"graph", 2}});
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, mesh, MeshAxes{{"data"}, {"graph"}});
    EXPECT_EQ(model.replica().divisor(), 2.0);
    // Every rank holds one row of the two rows of a sample; the loss is a sum over rows.
    const at::Tensor x = sample(world.rank(), {1, 5});
    model(x).square().sum().backward();
    auto alone = std::make_shared<Layers>();
    std::vector<at::Tensor> rows;
    for (int rank = 0; rank < 4; ++rank) rows.push_back(sample(rank, {1, 5}));
    (alone->forward(at::cat(rows)).square().sum() / 2).backward();
    expect_near(net->scale.grad(), alone->scale.grad(), "scale");
    EXPECT_THROW(data_parallel::replica_group(mesh, MeshAxes{{"data"}, {"data"}}), c10::ValueError);
    EXPECT_THROW(data_parallel::replica_group(mesh, MeshAxes{{}, {}}), c10::ValueError);
    EXPECT_THROW(data_parallel::replica_options(mesh, {}, {.divisor = 3}), c10::ValueError);
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

TEST(DistributedDataParallel, ReportsWhatItDid) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world, {.bucket_cap_mb = 0.0003});
    EXPECT_EQ(model.replica().overlap_report().num_buckets, 0);
    for (int step = 0; step < 3; ++step) loss_of(model(sample(1, {2, 5}))).backward();
    auto data = model.replica().logging_data();
    EXPECT_EQ(data.integers["world_size"], 2);
    EXPECT_EQ(data.integers["rank"], world.rank());
    EXPECT_EQ(data.integers["num_parameter_tensors"], 7);
    EXPECT_EQ(data.integers["has_rebuilt_buckets"], 1);
    EXPECT_EQ(data.strings["backend_name"], "custom");
    EXPECT_NE(data.strings["module_name"].find("Layers"), std::string::npos);
    const auto report = model.replica().overlap_report();
    EXPECT_EQ(report.num_buckets, static_cast<std::int64_t>(model.replica().buckets().size()));
    EXPECT_EQ(report.bytes, (5 + 3 * 30) * 8);
    EXPECT_GT(report.backward, 0);
    EXPECT_GE(report.comm, report.exposed_comm);
    EXPECT_TRUE(report.exposed_comm < 0.2 * report.backward || !report.advice.empty());
    std::size_t num_names = 0;
    for (const auto& bucket : model.replica().buckets()) num_names += bucket.size();
    EXPECT_EQ(num_names, 7U);
  });
}

TEST(DistributedDataParallel, SavesAndLoadsWithAndWithoutPrefix) {
  run_ranks(1, [](const comm::Group& world) {
    DistributedDataParallel model(std::make_shared<Layers>(2), world);
    auto state = model.state_dict();
    EXPECT_EQ(state.size(), 5U);
    EXPECT_EQ(model.state_dict("module.").count("module.layer1.weight"), 1U);
    auto other = std::make_shared<Layers>(2, 5, 77);
    DistributedDataParallel loaded(other, world);
    loaded.load_state_dict(model.state_dict("module."));
    EXPECT_TRUE(other->scale.equal(model.module()->scale));
    state.erase("scale");
    state["more"] = at::ones({1});
    try {
      loaded.load_state_dict(state);
      ADD_FAILURE();
    } catch (const c10::ValueError& error) {
      EXPECT_STREQ(error.what_without_backtrace(),
                   "load_state_dict: missing: [scale], unknown: [more].");
    }
    try {
      loaded.load_state_dict({{"scale", at::ones({2})}});
      ADD_FAILURE();
    } catch (const c10::ValueError& error) {
      EXPECT_STREQ(error.what_without_backtrace(),
                   "load_state_dict: 'scale' has the shape [2], the model's is [5].");
    }
  });
}

TEST(DistributedDataParallel, RefusesAStaticGraphAfterTheFact) {
  EXPECT_EQ(error_of([](const comm::Group& world) {
              DistributedDataParallel model(std::make_shared<Layers>(), world);
              model(sample(1, {2, 5}));
              model.replica().set_static_graph();
            }),
            "set_static_graph() should be called before the training loop starts: after "
            "construction, before the first forward.");
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

// ---- join ----

TEST(Join, TrainsOnUnevenInputs) {
  for (const auto engine : {comm::Engine::kShm, comm::Engine::kGloo}) {
    for (int size = 1; size <= (engine == comm::Engine::kShm ? 4 : 2); ++size) {
      for (const bool is_initial : {true, false}) {
        for (const auto& named : option_sets()) {
          if (engine == comm::Engine::kGloo && named.options.bucket_cap_mb_list.empty()) continue;
          if (named.options.automatic_graph) continue;
          run_ranks(
              size,
              [&](const comm::Group& world) {
                auto net = std::make_shared<Layers>();
                auto alone = std::make_shared<Layers>();
                DistributedDataParallel model(net, world, named.options);
                const auto length_of = [](int rank) { return 2 + 2 * rank; };
                model.join(
                    [&] {
                      for (int step = 0; step < length_of(world.rank()); ++step) {
                        loss_of(model(sample(100 * step + world.rank(), {2, 5}))).backward();
                        descend(*net);
                      }
                    },
                    JoinOptions{.divide_by_initial_world_size = is_initial});
                for (int step = 0; step < length_of(world.size() - 1); ++step) {
                  int num_active = 0;
                  for (int rank = 0; rank < world.size(); ++rank) {
                    if (step < length_of(rank)) ++num_active;
                  }
                  for (int rank = 0; rank < world.size(); ++rank) {
                    if (step >= length_of(rank)) continue;
                    const int divisor = is_initial ? world.size() : num_active;
                    (loss_of(alone->forward(sample(100 * step + rank, {2, 5}))) / divisor)
                        .backward();
                  }
                  descend(*alone);
                }
                // Also on ranks that ended early: the last one's model is sent to all.
                expect_near(net->scale, alone->scale, named.name);
                expect_near(net->layers[0]->weight, alone->layers[0]->weight, named.name);
              },
              test_options(engine));
        }
      }
    }
  }
}

TEST(Join, SharesBuffersOfTheLastActiveRank) {
  run_ranks(3, [](const comm::Group& world) {
    for (const bool has_hook : {false, true}) {
      auto net = std::make_shared<Counting>();
      DistributedDataParallel model(net, world);
      std::atomic<int> num_calls = 0;
      if (has_hook) {
        model.replica().register_buffer_hook([&](const auto& buffers) {
          ++num_calls;
          at::Tensor mean = buffers.at("mean");
          comm::all_reduce_(mean, world, comm::Reduction::kMax);
          return std::vector<data_parallel::FuturePtr>{};
        });
      }
      model.join([&] {
        for (int step = 0; step < 1 + world.rank(); ++step) {
          model(at::full({2, 3}, world.rank() + 1.0)).sum().backward();
        }
      });
      if (!has_hook) {
        EXPECT_EQ(net->count.item<std::int64_t>(), 3);
      }
      EXPECT_EQ(num_calls, has_hook ? 3 : 0);  // active or not
    }
  });
}

TEST(Join, ThrowsEarlyIfAsked) {
  const auto errors = run_ranks_collecting(3, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world);
    model.join(
        [&] {
          for (int step = 0; step < (world.rank() == 1 ? 1 : 3); ++step) {
            loss_of(model(sample(step, {2, 5}))).backward();
          }
        },
        JoinOptions{.throw_on_early_termination = true});
  });
  EXPECT_EQ(text_of(errors[1]), "Rank 1 exhausted all inputs.");
  for (const int rank : {0, 2}) {
    EXPECT_EQ(text_of(errors[rank]),
              "Detected at least one rank that exhausted inputs. Throwing across all ranks.");
  }
}

// Counts the collectives that pass through it.
class CountingBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  explicit CountingBackend(const comm::Group& inner)
      : Backend(inner.rank(), inner.size()),
        inner_(inner.process_group()->getBackend(c10::DeviceType::CPU)) {}
  const std::string getBackendName() const override { return "counting"; }
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& o) override {
    ++num_all_reduces;
    return inner_->allreduce(tensors, o);
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& o) override {
    ++num_broadcasts;
    return inner_->broadcast(tensors, o);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& o) override {
    ++num_all_gathers;
    return inner_->_allgather_base(out, in, o);
  }
  int num_all_reduces = 0, num_broadcasts = 0, num_all_gathers = 0;

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
};

TEST(Join, NeedsFewerMessagesThanTorch) {
  struct Normed : torch::nn::Module {
    Normed() {
      linear = register_module("linear", torch::nn::Linear(3, 3));
      norm = register_module("norm", torch::nn::BatchNorm1d(3));
    }
    at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
    torch::nn::Linear linear{nullptr};
    torch::nn::BatchNorm1d norm{nullptr};
  };
  run_ranks(2, [](const comm::Group& world) {
    const auto counter = c10::make_intrusive<CountingBackend>(world);
    const auto counted = c10::make_intrusive<c10d::ProcessGroup>(world.rank(), world.size());
    counted->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, counter);
    counted->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
    DistributedDataParallel model(std::make_shared<Normed>(), comm::Group(counted));
    EXPECT_EQ(counter->num_all_gathers, 1);  // digests
    EXPECT_EQ(counter->num_broadcasts, 2);   // one per type
    counter->num_broadcasts = 0;
    // torch: 18 and 12. Here, in each of 4 iterations: who is active, what it does, one bucket;
    // then nobody is active, and who was last. Buffers of two types 4 times and at the end, and 2
    // to order the buckets.
    model.join([&] {
      for (int step = 0; step < 2 + 2 * world.rank(); ++step) {
        model(sample(step, {4, 3}, at::kFloat)).sum().backward();
      }
    });
    EXPECT_EQ(counter->num_all_reduces, 4 * 3 + 2);
    EXPECT_EQ(counter->num_broadcasts, 4 * 2 + 2 + 2);
  });
}

struct Counter final : data_parallel::Joinable {
  explicit Counter(comm::Group group) : group(std::move(group)) {}
  void step() {
    notify_join_context();
    at::Tensor one = at::ones({1}, at::kLong);
    comm::all_reduce_(one, group);
    sums.push_back(one.item<std::int64_t>());
  }
  struct Hook final : data_parallel::JoinHook {
    explicit Hook(comm::Group group, std::vector<bool>* ends) : group(group), ends(ends) {}
    void main_hook() override {
      at::Tensor zero = at::zeros({1}, at::kLong);
      comm::all_reduce_(zero, group);
    }
    void post_hook(bool is_last_joiner) override { ends->push_back(is_last_joiner); }
    comm::Group group;
    std::vector<bool>* ends;
  };
  std::unique_ptr<data_parallel::JoinHook> join_hook(const JoinOptions&) override {
    return std::make_unique<Hook>(group, &ends);
  }
  comm::Group join_group() const override { return group; }
  comm::Group group;
  std::vector<std::int64_t> sums;
  std::vector<bool> ends;
};

TEST(Join, TakesSeveralObjects) {
  run_ranks(2, [](const comm::Group& world) {
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, world);
    auto hook = std::make_shared<Doubling>();
    model.register_comm_hook(hook);
    Counter counter(world);
    data_parallel::join({&model.replica(), &counter}, [&] {
      for (int step = 0; step < 2 + world.rank(); ++step) {
        loss_of(model(sample(step, {2, 5}))).backward();
        counter.step();
      }
    });
    EXPECT_EQ(counter.ends, std::vector<bool>{world.rank() == 1});
    if (world.rank() == 1) {
      EXPECT_EQ(counter.sums, (std::vector<std::int64_t>{2, 2, 1}));
    }
    EXPECT_EQ(hook->num_steps, 3);  // shadows count too

    int num_calls = 0;
    data_parallel::join({&counter}, [&] { ++num_calls; }, JoinOptions{.enable = false});
    EXPECT_EQ(num_calls, 1);
    EXPECT_THROW(data_parallel::join({}, [] {}), c10::ValueError);
    EXPECT_THROW(data_parallel::join({nullptr}, [] {}), c10::ValueError);
    const auto other = world.subgroup({0, 1}, "other");
    Counter stranger(*other);
    EXPECT_THROW(data_parallel::join({&counter, &stranger}, [] {}), c10::ValueError);
  });
}

// ---- anything, against thirty lines ----

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
