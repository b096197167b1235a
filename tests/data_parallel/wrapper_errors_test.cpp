// Models that differ between ranks, and arguments that make no sense.

#include <gtest/gtest.h>

#include "data_parallel/models.h"
#include "tessera/comm/error.h"

namespace tessera::testing {
namespace {

using data_parallel::Replica;

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

TEST(DistributedDataParallel, RefusesAStaticGraphAfterTheFact) {
  EXPECT_EQ(error_of([](const comm::Group& world) {
              DistributedDataParallel model(std::make_shared<Layers>(), world);
              model(sample(1, {2, 5}));
              model.replica().set_static_graph();
            }),
            "set_static_graph() should be called before training loop starts: after "
            "construction, before the first forward.");
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

}  // namespace
}  // namespace tessera::testing
