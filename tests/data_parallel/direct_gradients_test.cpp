// Gradients computed in their buckets against gradients copied there: the same bits, whatever the
// graph does with the memory.

#include <sys/stat.h>

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>
#include <torch/version.h>

#include "data_parallel/models.h"
#include "tessera/comm/collectives.h"

namespace tessera::testing {
namespace {

constexpr int kWidth = 64;  // weights of 32 KiB, large enough to be placed
constexpr int kSteps = 6;

using Parallel = DistributedDataParallel<Layers>;

template <class Model>
std::int64_t count(DistributedDataParallel<Model>& model, const char* what) {
  return model.replica().logging_data().integers.at(what);
}

/// Runs one backward of `step`. The gradients are compared afterwards and cleared.
using Scenario = std::function<void(Parallel& model, Layers& net, int step, int rank)>;

struct Counts {
  std::int64_t in_place = 0;
  std::int64_t moved = 0;
};

/// Trains two models alike, one of them with gradients in place, and returns what it counted.
Counts expect_same(const comm::Group& world, const Scenario& scenario, Options options = {}) {
  options.gradient_as_bucket_view = true;
  Counts counts;
  std::vector<std::vector<at::Tensor>> found[2];
  for (const bool is_direct : {false, true}) {
    options.direct_gradients = is_direct;
    auto net = std::make_shared<Layers>(3, kWidth);
    DistributedDataParallel model(net, world, options);
    for (int step = 0; step < kSteps; ++step) {
      scenario(model, *net, step, world.rank());
      found[is_direct].push_back(gradients(*net));
      descend(*net);
    }
    if (is_direct) {
      counts = {count(model, "num_gradients_in_place"), count(model, "num_buckets_moved")};
    }
  }
  for (int step = 0; step < kSteps; ++step) {
    for (std::size_t i = 0; i < found[0][step].size(); ++i) {
      const at::Tensor& copied = found[false][step][i];
      const at::Tensor& direct = found[true][step][i];
      EXPECT_EQ(copied.defined(), direct.defined()) << "step " << step << ", parameter " << i;
      if (!copied.defined() || !direct.defined()) continue;
      EXPECT_TRUE(copied.equal(direct)) << "step " << step << ", parameter " << i;
    }
  }
  return counts;
}

at::Tensor batch(int step, int rank, int rows = 4) {
  return sample(100 * step + rank, {rows, kWidth});
}

void step_plainly(Parallel& model, Layers&, int step, int rank) {
  loss_of(model(batch(step, rank))).backward();
}

void on_two_ranks(const std::function<void(const comm::Group&)>& body) {
  run_ranks(2, body);
  run_ranks(2, body, test_options(comm::Engine::kGloo));
}

TEST(DirectGradients, AreComputedInTheirBuckets) {
  on_two_ranks([](const comm::Group& world) {
    const Counts counts = expect_same(world, step_plainly);
    EXPECT_EQ(counts.in_place, 3 * (kSteps - 1));  // the first backward teaches
    EXPECT_EQ(counts.moved, 0);
  });
}

TEST(DirectGradients, WorkWithSmallBucketsAndMoreRanks) {
  for (const int size : {1, 2, 3}) {
    run_ranks(size, [](const comm::Group& world) {
      if (world.size() == 1) {
        auto net = std::make_shared<Layers>(3, kWidth);
        DistributedDataParallel model(net, world, {.gradient_as_bucket_view = true});
        EXPECT_EQ(model.replica().logging_data().integers.count("num_gradients_in_place"), 0);
        return;
      }
      const Counts counts = expect_same(world, step_plainly, {.bucket_cap_mb = 0.04});
      EXPECT_EQ(counts.in_place, 3 * (kSteps - 1));
      EXPECT_EQ(counts.moved, 0);
    });
  }
}

TEST(DirectGradients, AreLeftAloneWhereTheyCannotBePlaced) {
  run_ranks(2, [](const comm::Group& world) {
    std::vector<Options> sets = {{.find_unused_parameters = true, .gradient_as_bucket_view = true},
                                 {.gradient_as_bucket_view = false}};
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
    sets.push_back({.batched_grad_copy = true});
#endif
    for (const Options& options : sets) {
      auto net = std::make_shared<Layers>(2, kWidth);
      DistributedDataParallel model(net, world, options);
      loss_of(model(batch(0, world.rank()))).backward();
      EXPECT_EQ(model.replica().logging_data().integers.count("num_gradients_in_place"), 0);
    }
  });
}

TEST(DirectGradients, MayHaveTheSizeOfTheirNeighbours) {
  // The gradients of inputs are as large as those of weights.
  on_two_ranks([](const comm::Group& world) {
    const Counts counts = expect_same(world, [](Parallel& model, Layers&, int step, int rank) {
      at::Tensor x = batch(step, rank, kWidth).requires_grad_();
      loss_of(model(x)).backward();
    });
    EXPECT_GT(counts.in_place, 0);
    EXPECT_EQ(counts.moved, 0);
  });
}

TEST(DirectGradients, MayComeFromSeveralUses) {
  on_two_ranks([](const comm::Group& world) {
    const Counts counts = expect_same(world, [](Parallel& model, Layers& net, int step, int rank) {
      at::Tensor y = model(batch(step, rank));
      loss_of(net.layers[1](net.layers[0](y))).backward();
    });
    EXPECT_GT(counts.in_place, 0);
    EXPECT_EQ(counts.moved, 0);
  });
}

TEST(DirectGradients, AddUp) {
  on_two_ranks([](const comm::Group& world) {
    expect_same(world, [](Parallel& model, Layers& net, int step, int rank) {
      if (step % 3 == 1) {
        const auto scope = model.no_sync();
        step_plainly(model, net, step + 50, rank);
      }
      step_plainly(model, net, step, rank);
      if (step % 3 == 2) step_plainly(model, net, step + 70, rank);
    });
  });
}

TEST(DirectGradients, MayBeDifferentiatedAgain) {
  on_two_ranks([](const comm::Group& world) {
    expect_same(world, [](Parallel& model, Layers& net, int step, int rank) {
      at::Tensor x = batch(step, rank, kWidth).requires_grad_();
      at::Tensor y = model(x);
      if (step % 2 == 1) {
        const auto slopes = torch::autograd::grad({y.sum()}, {x}, {}, std::nullopt, true);
        (loss_of(y) + loss_of(slopes[0])).backward();
      } else {
        // Gradients that are nobody's, between a forward and its backward, and kept.
        const auto slopes = torch::autograd::grad({y.sum()}, {x, net.layers[0]->weight}, {}, true);
        const at::Tensor before = slopes[1].clone();
        (loss_of(y) + (x * slopes[0]).mean()).backward();
        EXPECT_TRUE(slopes[1].equal(before));
      }
    });
  });
}

TEST(DirectGradients, DoNotChangeWhatHooksKeep) {
  on_two_ranks([](const comm::Group& world) {
    for (const int kind : {0, 1, 2, 3}) {
      std::vector<at::Tensor> kept;
      std::vector<at::Tensor> then;
      const Counts counts =
          expect_same(world, [&](Parallel& model, Layers& net, int step, int rank) {
            if (step == 0) {
              net.layers[1]->weight.register_hook([&](const at::Tensor& gradient) {
                kept.push_back(kind == 0   ? gradient
                               : kind == 1 ? gradient.detach()
                               : kind == 2 ? gradient[3]
                                           : gradient * 3);
                then.push_back(kept.back().clone());
                return kind == 3 ? kept.back() * 1 : gradient;
              });
            }
            step_plainly(model, net, step, rank);
          });
      ASSERT_EQ(kept.size(), 2 * kSteps);
      for (std::size_t i = 0; i < kept.size(); ++i) {
        EXPECT_TRUE(kept[i].equal(then[i])) << "hook " << kind << ", call " << i;
      }
      EXPECT_GE(counts.in_place, 2 * (kSteps - 1)) << "hook " << kind;  // the other layers
    }
  });
}

TEST(DirectGradients, LeaveOldGradientsAloneThatBackwardNeeds) {
  on_two_ranks([](const comm::Group& world) {
    expect_same(world, [&](Parallel& model, Layers& net, int step, int rank) {
      const at::Tensor& weight = net.layers[1]->weight;
      step_plainly(model, net, step, rank);
      // Not counted as a change by autograd, which would refuse to go on.
      const at::Tensor old = weight.grad().variable_data();
      clear_gradients(net);
      (loss_of(model(batch(step + 50, rank))) + (weight * old).mean()).backward();
    });
  });
}

/// Gives its input's gradient, but makes other tensors of its size before and after, and keeps
/// them.
struct Decoy : torch::autograd::Function<Decoy> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::vector<at::Tensor>* kept, int before, int after) {
    context->saved_data["kept"] = reinterpret_cast<std::int64_t>(kept);
    context->saved_data["before"] = before;
    context->saved_data["after"] = after;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* kept = reinterpret_cast<std::vector<at::Tensor>*>(context->saved_data["kept"].toInt());
    for (int i = 0; i < context->saved_data["before"].toInt(); ++i) {
      kept->push_back(at::full_like(gradients[0], i + 1));
    }
    const at::Tensor result = gradients[0].clone();
    for (int i = 0; i < context->saved_data["after"].toInt(); ++i) {
      kept->push_back(at::full_like(gradients[0], -i - 1));
    }
    return {result, {}, {}, {}};
  }
};

TEST(DirectGradients, MoveOutOfTheWayOfOthers) {
  on_two_ranks([](const comm::Group& world) {
    for (const bool keeps : {true, false}) {
      std::vector<at::Tensor> kept;
      const Counts counts =
          expect_same(world, [&](Parallel& model, Layers& net, int step, int rank) {
            const at::Tensor y = model(batch(step, rank));
            const int before = step < 2 ? 0 : (step + rank) % 3;
            const at::Tensor weight =
                Decoy::apply(net.layers[2]->weight, &kept, before, (step + 1) % 2);
            loss_of(at::matmul(y, weight)).backward();
            for (const at::Tensor& tensor : kept) {
              EXPECT_TRUE(tensor.eq(tensor.flatten()[0]).all().item<bool>());
              EXPECT_LE(tensor.flatten()[0].abs().item<double>(), 2);
            }
            if (!keeps) kept.clear();
          });
      EXPECT_GT(counts.in_place, 0);
    }
  });
}

/// One weight, used through a decoy and nowhere else.
struct Decoyed : torch::nn::Module {
  Decoyed() {
    weight = register_parameter("weight", sample(3, {kWidth, kWidth}) * 0.05);
    other = register_parameter("other", sample(4, {kWidth, kWidth}) * 0.05);
  }
  at::Tensor forward(const at::Tensor& x, std::vector<at::Tensor>* kept, int before) {
    return at::matmul(at::matmul(x, other), Decoy::apply(weight, kept, before, 0));
  }
  at::Tensor weight, other;
};

TEST(DirectGradients, MoveTheirBucketWhenTheGuessWasWrong) {
  on_two_ranks([](const comm::Group& world) {
    auto alone = std::make_shared<Decoyed>();
    auto net = std::make_shared<Decoyed>();
    DistributedDataParallel model(net, world, {.gradient_as_bucket_view = true});
    std::vector<at::Tensor> kept;
    std::vector<at::Tensor> unused;
    for (int step = 0; step < 12; ++step) {
      // Ranks guess wrongly in different steps; a rank's bucket may move without the other's.
      const int before = step < 3 ? 0 : (step + world.rank()) % 2;
      const at::Tensor all = at::cat({batch(step, 0), batch(step, 1)});
      loss_of(alone->forward(all, &unused, 0)).backward();
      loss_of(model(batch(step, world.rank()), &kept, before)).backward();
      expect_near(net->weight.grad(), alone->weight.grad(), "weight");
      expect_near(net->other.grad(), alone->other.grad(), "other");
      for (const at::Tensor& tensor : kept) EXPECT_TRUE(tensor.eq(1).all().item<bool>());
      descend(*alone);
      descend(*net);
    }
    EXPECT_GE(count(model, "num_buckets_moved"), 1);
    EXPECT_LE(count(model, "num_buckets_moved"), 3);                // then it is given up
    EXPECT_EQ(count(model, "num_gradients_in_place") >= 11, true);  // `other`, every time but one
  });
}

TEST(DirectGradients, OfSeveralModelsDoNotMix) {
  on_two_ranks([](const comm::Group& world) {
    std::shared_ptr<Layers> second;
    std::unique_ptr<Parallel> other;
    expect_same(world, [&](Parallel& model, Layers&, int step, int rank) {
      if (step == 0) {
        other.reset();
        second = std::make_shared<Layers>(2, kWidth, 7);
        other = std::make_unique<Parallel>(second, world, Options{.gradient_as_bucket_view = true});
      }
      at::Tensor x = batch(step, rank, kWidth);
      const at::Tensor first = model(x);
      const at::Tensor then = (*other)(x + 1);
      if (step % 2 == 0) {
        loss_of(first).backward();
        loss_of(then).backward();
      } else if (step % 3 == 0) {
        loss_of(then).backward();
        loss_of(first).backward();
      } else {
        (loss_of(first) + loss_of(then)).backward();
      }
      for (const at::Tensor& parameter : second->parameters()) {
        EXPECT_TRUE(parameter.grad().defined());
      }
      descend(*second);
    });
    other.reset();
  });
}

TEST(DirectGradients, FollowTheGraph) {
  // Static graphs with an unused layer, and graphs that are found to be static.
  run_ranks(2, [](const comm::Group& world) {
    const Scenario scenario = [](Parallel& model, Layers&, int step, int rank) {
      loss_of(model(batch(step, rank), std::vector<bool>{true, false, true})).backward();
    };
    const Counts counts = expect_same(world, scenario, {.static_graph = true});
    EXPECT_EQ(counts.moved, 0);
    EXPECT_GT(counts.in_place, 0);

    auto net = std::make_shared<Layers>(3, kWidth);
    DistributedDataParallel model(net, world,
                                  {.automatic_graph = true, .gradient_as_bucket_view = true});
    for (int step = 0; step < 10; ++step) {
      loss_of(model(batch(step, world.rank()))).backward();
      clear_gradients(*net);
    }
    EXPECT_GT(count(model, "num_gradients_in_place"), 0);
  });
}

TEST(DirectGradients, SurviveABackwardThatFails) {
  on_two_ranks([](const comm::Group& world) {
    bool fails = false;
    expect_same(world, [&](Parallel& model, Layers& net, int step, int rank) {
      if (step == 0) {
        net.layers[0]->weight.register_hook([&](const at::Tensor& gradient) {
          if (fails) throw std::runtime_error("enough");
          return gradient;
        });
      }
      if (step == 3) {
        // Every bucket but the last has been reduced, on both ranks.
        fails = true;
        EXPECT_THROW(step_plainly(model, net, step, rank), std::runtime_error);
        fails = false;
        clear_gradients(net);
      }
      step_plainly(model, net, step, rank);
    });
  });
}

TEST(DirectGradients, OutliveTheirModel) {
  run_ranks(2, [](const comm::Group& world) {
    at::Tensor gradient;
    {
      auto net = std::make_shared<Layers>(2, kWidth);
      DistributedDataParallel model(net, world, {.gradient_as_bucket_view = true});
      for (int step = 0; step < 3; ++step) {
        clear_gradients(*net);
        step_plainly(model, *net, step, world.rank());
      }
      gradient = net->layers[0]->weight.grad();
    }
    const at::Tensor copy = gradient.clone();
    auto net = std::make_shared<Layers>(2, kWidth);
    DistributedDataParallel model(net, world, {.gradient_as_bucket_view = true});
    for (int step = 5; step < 8; ++step) step_plainly(model, *net, step, world.rank());
    EXPECT_TRUE(gradient.equal(copy));
  });
}

/// Bytes of all segments this process has open; they have no name any more.
std::int64_t segment_bytes() {
  std::map<ino_t, std::int64_t> files;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::filesystem::path target = std::filesystem::read_symlink(entry.path(), gone);
    struct stat status{};
    if (gone || target.string().find("memfd:tessera") == std::string::npos) continue;
    if (::stat(entry.path().c_str(), &status) != 0) continue;
    files[status.st_ino] = static_cast<std::int64_t>(status.st_blocks) * 512;
  }
  std::int64_t total = 0;
  for (const auto& [file, bytes] : files) total += bytes;
  return total;
}

/// Whether the address lies in the mapping of a segment.
bool is_in_a_segment(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    if (line.find("memfd:tessera") == std::string::npos) continue;
    std::uintptr_t first = 0;
    std::uintptr_t last = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> first >> dash >> last;
    if (first <= address && address < last) return true;
  }
  return false;
}

TEST(DistributedDataParallel, KeepsGradientsOnceInTheSegment) {
  for (const bool is_direct : {false, true}) {
    run_ranks(2, [=](const comm::Group& world) {
      // 50 MiB: several buckets of 25, cut anew after the first backward.
      auto net = std::make_shared<Layers>(6, 1024);
      std::int64_t bytes = 0;
      for (const at::Tensor& parameter : net->parameters()) {
        bytes += static_cast<std::int64_t>(parameter.nbytes());
      }
      comm::barrier(world);
      const std::int64_t before = segment_bytes();
      comm::barrier(world);
      DistributedDataParallel model(
          net, world, {.gradient_as_bucket_view = true, .direct_gradients = is_direct});
      for (int step = 0; step < 4; ++step) {
        clear_gradients(*net);
        loss_of(model(sample(step, {2, 1024}))).backward();
      }
      comm::barrier(world);
      // Both ranks are in this process, and a segment never shrinks.
      const std::int64_t taken = (segment_bytes() - before) / world.size();
      comm::barrier(world);
      EXPECT_GE(taken, bytes);
      EXPECT_LE(static_cast<double>(taken), 1.05 * static_cast<double>(bytes));
      for (const at::Tensor& parameter : net->parameters()) {
        EXPECT_TRUE(is_in_a_segment(parameter.grad().data_ptr()));
      }
    });
  }
}

TEST(DirectGradients, MayBeClearedInPlaceAtAnyPlaceOfAStep) {
  // zero_grad(false) detaches gradients in place, which views of a bucket would refuse: before and
  // after the forward, also the one that cuts the buckets anew, and where the wrapper finds
  // gradients.
  run_ranks(2, [](const comm::Group& world) {
    for (const bool is_direct : {true, false}) {
      auto net = std::make_shared<Layers>(3, kWidth);
      auto alone = std::make_shared<Layers>(3, kWidth);
      for (const auto& parameter : net->parameters()) {
        parameter.mutable_grad() = at::ones_like(parameter);
      }
      DistributedDataParallel model(
          net, world, {.gradient_as_bucket_view = true, .direct_gradients = is_direct});
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      torch::optim::SGD reference(alone->parameters(), 0.1);
      optimizer.zero_grad(/*set_to_none=*/false);
      for (int step = 0; step < 4; ++step) {
        const at::Tensor x =
            sample(step, {2, kWidth});  // the same on all ranks: the average is its own
        const at::Tensor loss = loss_of(model(x));
        optimizer.zero_grad(/*set_to_none=*/false);
        loss.backward();
        optimizer.step();
        reference.zero_grad(/*set_to_none=*/false);
        loss_of(alone->forward(x)).backward();
        reference.step();
        const auto mine = net->parameters();
        const auto other = alone->parameters();
        for (std::size_t i = 0; i < mine.size(); ++i) {
          expect_near(mine[i], other[i], "step " + std::to_string(step), 1e-6);
        }
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing
