// Hooks, groups and meshes; what a wrapper says about itself.

#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>

#include "data_parallel/models.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/mesh.h"

namespace tessera::testing {
namespace {

using data_parallel::MeshAxes;

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

// Its first reduction writes to the bucket only when the second is asked for, as a slow one would.
class LateWriter final : public data_parallel::CommHook {
 public:
  data_parallel::FuturePtr reduce(data_parallel::Bucket& bucket) override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    if (!late_.defined()) {
      late_ = bucket.buffer();
      pending_ = future;
      return future;
    }
    late_.fill_(1e9);
    if (!pending_->completed()) pending_->markCompleted(late_);
    at::Tensor buffer = bucket.buffer();
    comm::all_reduce_(buffer, bucket.group());
    future->markCompleted(buffer.div_(bucket.divisor()));
    return future;
  }
  std::string name() const override { return "late_writer"; }

 private:
  at::Tensor late_;
  data_parallel::FuturePtr pending_;
};

TEST(DistributedDataParallel, IsSafeFromReductionsOfABrokenBackward) {
  run_ranks(2, [](const comm::Group& world) {
    for (const bool is_view : {false, true}) {
      auto net = std::make_shared<torch::nn::LinearImpl>(3, 3);
      DistributedDataParallel model(net, world, {.gradient_as_bucket_view = is_view});
      model.register_comm_hook(std::make_shared<LateWriter>());
      at::Tensor x = at::full({2, 3}, world.rank() + 1.0).requires_grad_();
      x.register_hook([](const at::Tensor&) -> at::Tensor {
        throw std::runtime_error("after the gradients of the layer");
      });
      EXPECT_THROW(model(x * 1).sum().backward(), std::runtime_error);
      for (int step = 0; step < 3; ++step) {
        for (at::Tensor& parameter : net->parameters()) {
          if (parameter.grad().defined()) parameter.mutable_grad().zero_();
        }
        model(x.detach()).sum().backward();
        expect_near(net->weight.grad(), at::full({3, 3}, 3.0), "weight", 1e-6);
      }
    }
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

TEST(DistributedDataParallel, GetsCompanyAfterTrainingAlone) {
  run_ranks(2, [](const comm::Group& world) {
    const auto first = world.subgroup({0}, "first");
    const auto second = world.subgroup({1}, "second");
    auto net = std::make_shared<Layers>();
    DistributedDataParallel model(net, first ? *first : *second);
    loss_of(model(sample(7, {2, 5}))).backward();
    auto alone = std::make_shared<Layers>();
    loss_of(alone->forward(sample(7, {2, 5}))).backward();
    EXPECT_TRUE(net->scale.grad().equal(alone->scale.grad()));
    model.replica().update_process_group(world);
    for (int step = 0; step < 3; ++step) {
      clear_gradients(*net);
      loss_of(model(sample(world.rank(), {2, 5}))).backward();
    }
    clear_gradients(*alone);
    loss_of(alone->forward(at::cat({sample(0, {2, 5}), sample(1, {2, 5})}))).backward();
    expect_near(net->scale.grad(), alone->scale.grad(), "scale");
    model.replica().update_process_group(first ? *first : *second);
    clear_gradients(*net);
    clear_gradients(*alone);
    loss_of(model(sample(7, {2, 5}))).backward();
    loss_of(alone->forward(sample(7, {2, 5}))).backward();
    expect_near(net->scale.grad(), alone->scale.grad(), "scale, alone again");
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

TEST(DistributedDataParallel, ReportsWhatItDid) {
  const auto body = [](const comm::Group& world) {
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
  };
  for (const auto engine : {comm::Engine::kShm, comm::Engine::kGloo}) {
    run_ranks(2, body, test_options(engine));
  }
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

}  // namespace
}  // namespace tessera::testing
