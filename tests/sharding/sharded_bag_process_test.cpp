// Sharded tables on ranks that are processes, over shared memory and over Gloo.

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "sharding/sharded_tables.h"
#include "support/rank_processes.h"
#include "support/ranks.h"
#include "tessera/comm/collectives.h"
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

// Bytes that have left this host's network namespace, but for those to itself.
std::int64_t bytes_sent() {
  std::ifstream devices("/proc/net/dev");
  std::int64_t total = 0;
  for (std::string line; std::getline(devices, line);) {
    const auto colon = line.find(':');
    if (colon == std::string::npos || line.substr(0, colon).find("lo") != std::string::npos)
      continue;
    std::istringstream numbers(line.substr(colon + 1));
    std::int64_t number = 0;
    for (int column = 0; column < 9; ++column) numbers >> number;  // the ninth: bytes sent
    total += number;
  }
  return total;
}

// Started by test_hosts.py as well. Without the sums, each of the two ranks of host 1 would send
// its rows to the samples of host 0: twice the bytes.
TEST(BagLaunched, SumsSaveBytesBetweenHosts) {
  if (std::getenv("TESSERA_TEST_HOSTS") == nullptr) GTEST_SKIP() << "test_hosts.py starts it";
  constexpr int kPasses = 10;
  constexpr std::int64_t kBatch = 256;
  constexpr std::int64_t kColumns = 64;
  const comm::Group group = comm::init();
  Job job;
  job.tables = {table("rows", 40, kColumns, {"f"})};
  job.batches = {kBatch, kBatch, kBatch, kBatch};
  const Topology topology{4, 2};
  ShardedOptions options;
  options.local_size = 2;
  ShardedEmbeddingBagCollection tables(
      job.tables, make_module_plan(job.tables, {{"rows", table_row_wise(1)}}, topology), group,
      false, options);
  tables.load_tables(job.initial());
  const at::NoGradGuard no_grad;
  const auto features = job.bags(0, group.rank()).kjt(false);
  tables.forward(features);
  comm::barrier(group);
  const std::int64_t before = bytes_sent();
  for (int pass = 0; pass < kPasses; ++pass) tables.forward(features);
  comm::barrier(group);
  const std::int64_t sent = bytes_sent() - before;
  if (group.rank() < 2) return;
  // The samples of host 0, once; sizes, lengths and acknowledgements come on top.
  constexpr double kRows = 4.0 * kPasses * 2 * kBatch * kColumns;
  EXPECT_GT(static_cast<double>(sent), kRows);
  EXPECT_LT(static_cast<double>(sent), 1.3 * kRows);
}

}  // namespace
}  // namespace tessera::sharding
