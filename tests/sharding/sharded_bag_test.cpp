// Sharded tables against one process that has all tables and all samples: what comes out, what the
// tables are after one and after three steps, what the optimizer keeps.

#include <gtest/gtest.h>

#include "sharding/sharded_tables.h"
#include "support/ranks.h"

namespace tessera::sharding {
namespace {

using embedding::OptimizerKind;
using embedding::PoolingType;
using tessera::testing::Expected;
using tessera::testing::Job;
using tessera::testing::run_alone;
using tessera::testing::run_ranks;
using tessera::testing::run_sharded;
using tessera::testing::table;
using tessera::testing::test_options;

void check(const Job& job, comm::Engine engine = comm::Engine::kAuto) {
  const Expected expected = run_alone(job);
  run_ranks(
      job.world(), [&](const comm::Group& group) { run_sharded(job, expected, group); },
      test_options(engine));
}

Placement fused_data_parallel() { return data_parallel().with_kernel(ComputeKernel::kFused); }

Job job_of(int world) {
  Job job;
  job.tables = {table("a", 11, 4, {"f0", "f1"}), table("b", 7, 3), table("c", 20, 8, {"f2"})};
  for (int rank = 0; rank < world; ++rank) job.batches.push_back(5);
  job.options.optimizer.kind = OptimizerKind::kAdam;
  job.options.optimizer.learning_rate = 0.1;
  return job;
}

class Bag : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Bag, ::testing::Values(1, 2, 3, 4));

TEST_P(Bag, TableWise) {
  Job job = job_of(GetParam());
  job.wishes = {{"a", table_wise(GetParam() - 1)}, {"b", table_wise(0)}, {"c", table_wise(0)}};
  check(job);
}

TEST_P(Bag, RowWise) {
  Job job = job_of(GetParam());
  job.wishes = {{"a", row_wise()}, {"b", row_wise()}, {"c", row_wise()}};
  check(job);
}

TEST_P(Bag, ColumnWise) {
  Job job = job_of(GetParam());
  std::vector<int> ranks;
  for (int i = 0; i < 3; ++i) ranks.push_back(i % GetParam());
  job.wishes = {
      {"a", column_wise(ranks)}, {"b", column_wise({0})}, {"c", table_column_wise(ranks)}};
  check(job);
}

TEST_P(Bag, DataParallel) {
  Job job = job_of(GetParam());
  job.wishes = {
      {"a", fused_data_parallel()}, {"b", fused_data_parallel()}, {"c", fused_data_parallel()}};
  check(job);
}

TEST_P(Bag, Mixed) {
  Job job = job_of(GetParam());
  job.wishes = {{"a", fused_data_parallel()}, {"b", row_wise()}, {"c", table_wise(GetParam() - 1)}};
  job.options.optimizer.kind = OptimizerKind::kRowWiseAdagrad;
  check(job);
}

}  // namespace
}  // namespace tessera::sharding
