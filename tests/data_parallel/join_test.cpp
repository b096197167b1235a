// Ranks with different numbers of batches.

#include <gtest/gtest.h>

#include <atomic>

#include "data_parallel/models.h"
#include "data_parallel/option_sets.h"
#include "tessera/comm/collectives.h"

namespace tessera::testing {
namespace {

using data_parallel::JoinOptions;

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

TEST(Join, GoesOnWithRanksThatHadNoBatchInIt) {
  run_ranks(3, [](const comm::Group& world) {
    for (const bool is_static : {false, true}) {
      const std::vector<bool> used{true, !is_static};  // a static graph may leave parameters out
      data_parallel::Options options;
      options.static_graph = is_static;
      auto net = std::make_shared<Layers>(2);
      auto alone = std::make_shared<Layers>(2);
      DistributedDataParallel model(net, world, options);
      model.join([&] {
        for (int step = 0; step < 2 * world.rank(); ++step) {  // none on rank 0
          loss_of(model(sample(step, {2, 5}), used)).backward();
        }
      });
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        alone->zero_grad();
        loss_of(model(sample(100 * step + world.rank(), {2, 5}), used)).backward();
        for (int rank = 0; rank < world.size(); ++rank) {
          const at::Tensor input = sample(100 * step + rank, {2, 5});
          (loss_of(alone->forward(input, used)) / world.size()).backward();
        }
        expect_near(net->scale.grad(), alone->scale.grad(), is_static ? "static" : "not static");
        expect_near(net->layers[0]->weight.grad(), alone->layers[0]->weight.grad(), "layer");
      }
    }
  });
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

}  // namespace
}  // namespace tessera::testing
