// Sharded tables on CUDA, against one process on the CPU. Several ranks are processes that share
// the GPU, over an engine that goes through host memory; one rank has NCCL.

#include <gtest/gtest.h>

#include <ATen/Context.h>

#include "sharding/sharded_rows.h"
#include "sharding/sharded_tables.h"
#include "support/error_text.h"
#include "support/rank_processes.h"
#include "support/ranks.h"
#include "tessera/comm/leader.h"

namespace tessera::sharding {
namespace {

using embedding::GradientForm;
using embedding::OptimizerKind;
using embedding::PoolingType;
using tessera::testing::Bags;
using tessera::testing::error_text;
using tessera::testing::Job;
using tessera::testing::random_bags;
using tessera::testing::RankProcesses;
using tessera::testing::rows_alone;
using tessera::testing::rows_sharded;
using tessera::testing::run_alone;
using tessera::testing::run_ranks;
using tessera::testing::run_sharded;
using tessera::testing::table;
using tessera::testing::test_options;

/// The ranks of `group` with its engine for CUDA and no other, as a group of NCCL alone is: sizes
/// and texts have to travel on the GPU, too.
comm::Group without_cpu_engine(const comm::Group& group) {
  const auto engine = group.process_group()->getBackend(c10::DeviceType::CUDA);
  auto only = c10::make_intrusive<c10d::ProcessGroup>(group.store(), group.rank(), group.size());
  only->setBackend(c10::DeviceType::CUDA,
                   engine->getBackendName() == "nccl" ? c10d::ProcessGroup::BackendType::NCCL
                                                      : c10d::ProcessGroup::BackendType::CUSTOM,
                   engine);
  return comm::Group(only);
}

enum class Way { kShm, kGloo, kOnlyCuda };

std::string word_for(Way way) {
  return way == Way::kShm ? "shm" : way == Way::kGloo ? "gloo" : "only_cuda";
}

/// Two ranks on one GPU.
class ShardedCuda : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || at::getNumGPUs() == 0) GTEST_SKIP() << "there is no GPU here";
  }
  void on_two_ranks(const std::function<void(const comm::Group&)>& body) {
    comm::GroupOptions options =
        test_options(GetParam() == Way::kShm ? comm::Engine::kShm : comm::Engine::kGloo);
    options.timeout = std::chrono::seconds(60);  // the first use of a GPU takes some
    processes_.run(
        2,
        [&](const comm::Group& group) {
          body(GetParam() == Way::kOnlyCuda ? without_cpu_engine(group) : group);
        },
        options);
  }
  void check(const Job& job) {
    const auto expected = run_alone(job);
    on_two_ranks([&](const comm::Group& group) { run_sharded(job, expected, group); });
  }

 private:
  RankProcesses processes_;
};

INSTANTIATE_TEST_SUITE_P(Ways, ShardedCuda,
                         ::testing::Values(Way::kShm, Way::kGloo, Way::kOnlyCuda),
                         [](const auto& info) { return word_for(info.param); });

/// One table of every kind of sharding.
Job mixed_job() {
  Job job;
  job.tables = {table("rows", 11, 4, {"f0", "f1"}, PoolingType::kMean),
                table("whole", 7, 3, {"f2"}), table("columns", 9, 8, {"f3", "f0"}),
                table("copies", 6, 5, {"f4"})};
  job.wishes = {{"rows", row_wise()},
                {"whole", table_wise(1)},
                {"columns", column_wise({1, 0})},
                {"copies", data_parallel().with_kernel(ComputeKernel::kFused)}};
  job.batches = {4, 6};
  job.options.device = at::kCUDA;
  return job;
}

TEST_P(ShardedCuda, EveryKindOfSharding) { check(mixed_job()); }

TEST_P(ShardedCuda, WeightsAndExactNormsWithAnEmptyBatch) {
  Job job = mixed_job();
  job.batches = {5, 0};
  job.is_weighted = true;
  job.ids_type = at::kInt;
  job.options.optimizer.kind = OptimizerKind::kRowWiseAdagrad;
  job.options.exact_row_norms = true;
  check(job);
}

TEST_P(ShardedCuda, VariableBatches) {
  Job job = mixed_job();
  job.is_variable = true;
  job.options.optimizer.kind = OptimizerKind::kAdam;
  check(job);
}

TEST_P(ShardedCuda, SparseGradients) {
  Job job = mixed_job();
  job.options.gradients = GradientForm::kSparse;
  job.options.optimizer.kind = OptimizerKind::kAdagrad;
  check(job);
}

TEST_P(ShardedCuda, SingleRows) {
  Job job = mixed_job();
  for (auto& config : job.tables) config.pooling = PoolingType::kSum;
  job.options.optimizer.kind = OptimizerKind::kAdam;
  const auto alone = rows_alone(job);
  for (const bool is_once : {false, true}) {
    on_two_ranks([&](const comm::Group& group) { rows_sharded(job, alone, is_once, group); });
  }
}

TEST_P(ShardedCuda, ClippingCountsTheGradientsOfAllRanks) {
  on_two_ranks([](const comm::Group& group) {
    // One row per rank, each with a gradient of ones: the norm over both is sqrt(2 * 4).
    const std::vector<embedding::EmbeddingBagConfig> tables = {table("t", 2, 4, {"f"})};
    ShardedOptions options;
    options.device = at::kCUDA;
    options.gradients = GradientForm::kSparse;
    options.local_size = 2;
    ShardedEmbeddingBagCollection collection(
        tables, make_module_plan(tables, {{"t", row_wise()}}, {2, 2}), group, false, options);
    Bags bags;
    bags.keys = {"f"};
    bags.ids = {{{0, 1}}};
    bags.weights = {{{1, 1}}};
    const auto output = collection.forward(bags.kjt(false).to(at::kCUDA));
    output.values().sum().backward();
    EXPECT_NEAR(collection.clip_grad_norm(1.0), std::sqrt(8.0), 1e-6);
    EXPECT_NEAR(collection.clip_grad_norm(10.0), 1.0, 1e-6);
  });
}

TEST_P(ShardedCuda, FaultsAreTheSameOnAllRanks) {
  on_two_ranks([](const comm::Group& group) {
    const Job job = mixed_job();
    ShardedOptions options = job.options;
    options.local_size = 2;
    ShardedEmbeddingBagCollection tables(
        job.tables, make_module_plan(job.tables, job.wishes, {2, 2}), group, false, options);
    Bags bags = job.bags(0, group.rank());
    if (group.rank() == 1) bags.ids[1] = {{100}, {}, {}, {}, {}, {}};
    const auto of_bad_id = error_text([&] { tables.forward(bags.kjt(false).to(at::kCUDA)); });
    EXPECT_NE(of_bad_id.find("on rank 1, feature '" + bags.keys[1] +
                             "', sample 0 has id 100, but table '"),
              std::string::npos)
        << of_bad_id;
    const auto of_device =
        error_text([&] { tables.forward(job.bags(0, group.rank()).kjt(false)); });
    EXPECT_NE(of_device.find("the features are on cpu, the tables are on cuda:0."),
              std::string::npos)
        << of_device;
    tables.forward(job.bags(0, group.rank()).kjt(false).to(at::kCUDA));
  });
}

TEST_P(ShardedCuda, RanksThatDisagreeOnThePlanAreTold) {
  on_two_ranks([](const comm::Group& group) {
    Job job = mixed_job();
    job.wishes.at("whole") = table_wise(group.rank());
    const auto text = error_text([&] {
      ShardedEmbeddingBagCollection(job.tables, make_module_plan(job.tables, job.wishes, {2, 2}),
                                    group, false, job.options);
    });
    EXPECT_NE(text.find("rank 0 has 'whole'"), std::string::npos) << text;
    EXPECT_NE(text.find("rank 1 has 'whole'"), std::string::npos) << text;
  });
}

TEST_P(ShardedCuda, PlansAreBroadcast) {
  on_two_ranks([](const comm::Group& group) {
    const auto bytes = comm::invoke_on_rank_and_broadcast_bytes(
        group, 1, [] { return std::vector<std::uint8_t>{3, 1, 4}; });
    EXPECT_EQ(bytes, (std::vector<std::uint8_t>{3, 1, 4}));
  });
}

/// One rank with a GPU of its own: NCCL, beside an engine for the CPU or alone.
class ShardedNccl : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || at::getNumGPUs() == 0) GTEST_SKIP() << "there is no GPU here";
  }
};

INSTANTIATE_TEST_SUITE_P(Engines, ShardedNccl, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "alone" : "beside_cpu"; });

TEST_P(ShardedNccl, OneRank) {
  Job job = mixed_job();
  job.wishes.at("whole") = table_wise(0);
  job.wishes.at("columns") = column_wise({0, 0});
  job.batches = {5};
  job.is_weighted = true;
  job.options.optimizer.kind = OptimizerKind::kRowWiseAdagrad;
  job.options.exact_row_norms = true;
  const auto expected = run_alone(job);
  Job rows = mixed_job();
  for (auto& config : rows.tables) config.pooling = PoolingType::kSum;
  rows.wishes = job.wishes;
  rows.batches = {5};
  const auto alone = rows_alone(rows);
  run_ranks(1, [&](const comm::Group& both) {
    const comm::Group group = GetParam() ? without_cpu_engine(both) : both;
    ASSERT_EQ(group.process_group()->getBackend(at::kCUDA)->getBackendName(), "nccl");
    run_sharded(job, expected, group);
    rows_sharded(rows, alone, /*is_once=*/true, group);
    // What the sizes of larger groups travel by.
    EXPECT_EQ(comm::invoke_on_rank_and_broadcast_bytes(
                  group, 0, [] { return std::vector<std::uint8_t>{2, 7}; }),
              (std::vector<std::uint8_t>{2, 7}));
  });
}

}  // namespace
}  // namespace tessera::sharding
