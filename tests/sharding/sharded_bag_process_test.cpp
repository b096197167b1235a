// Sharded tables on ranks that are processes, over shared memory and over Gloo.

#include <gtest/gtest.h>

#include "sharding/sharded_tables.h"
#include "support/rank_processes.h"
#include "support/ranks.h"

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

}  // namespace
}  // namespace tessera::sharding
