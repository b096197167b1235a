// Sharded tables on ranks that are processes, over shared memory and over Gloo.

#include <gtest/gtest.h>

#include <cstdlib>

#include "sharding/sharded_tables.h"
#include "support/rank_processes.h"
#include "support/ranks.h"
#include "tessera/comm/topology.h"

namespace tessera::sharding {
namespace {

using embedding::PoolingType;
using tessera::testing::Job;
using tessera::testing::RankProcesses;
using tessera::testing::run_alone;
using tessera::testing::run_sharded;
using tessera::testing::table;
using tessera::testing::test_options;

TEST(BagProcesses, AnyEngine) {
  Job job;
  job.tables = {table("rows", 11, 4, {"f0", "f1"}, PoolingType::kMean),
                table("whole", 7, 3, {"f2"}), table("columns", 9, 8, {"f3", "f0"}),
                table("copies", 6, 5, {"f4"})};
  job.wishes = {{"rows", row_wise()},
                {"whole", table_wise(2)},
                {"columns", column_wise({1, 0})},
                {"copies", data_parallel().with_kernel(ComputeKernel::kFused)}};
  job.batches = {4, 0, 6};
  job.is_weighted = true;
  job.options.optimizer.kind = embedding::OptimizerKind::kRowWiseAdagrad;
  job.options.exact_row_norms = true;
  const auto expected = run_alone(job);
  RankProcesses ranks;
  for (const comm::Engine engine : {comm::Engine::kShm, comm::Engine::kGloo}) {
    ranks.run(
        3, [&](const comm::Group& group) { run_sharded(job, expected, group); },
        test_options(engine));
  }
}

// Started by test_hosts.py on two hosts of two ranks each: rows are summed inside the hosts.
TEST(BagLaunched, SumsInHosts) {
  if (std::getenv("TESSERA_TEST_HOSTS") == nullptr) GTEST_SKIP() << "test_hosts.py starts it";
  const comm::Group group = comm::init();
  Job job;
  job.tables = {table("rows", 11, 4, {"f0", "f1"}, PoolingType::kMean),
                table("grid", 9, 8, {"f3", "f0"}), table("whole", 7, 3, {"f2"}),
                table("all", 13, 6, {"f4"})};
  job.wishes = {{"rows", table_row_wise(1)},
                {"grid", grid_shard({0, 1})},
                {"whole", table_wise(2)},
                {"all", row_wise()}};
  job.batches = {4, 0, 6, 3};
  job.local_size = comm::get_local_size(group.size());
  EXPECT_EQ(job.local_size, 2);
  EXPECT_EQ(group.engine(), "shm+gloo");
  run_sharded(job, run_alone(job), group);
}

}  // namespace
}  // namespace tessera::sharding
