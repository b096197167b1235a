// What a plan of a training costs by the planner: closed forms for every way of cutting.

#include <cmath>

#include <gtest/gtest.h>

#include "dlrm/from_settings.h"
#include "dlrm/training.h"

namespace tessera::workloads::dlrm {
namespace {

using embedding::EmbeddingTableConfig;
using planner::ShardCost;
using sharding::Topology;

// Bandwidths that tell the parts apart: a byte in memory, in the host, in the network.
constexpr planner::Speeds kUnit{.memory = 1, .host = 1e-3, .network = 1e-6};

EmbeddingTableConfig table(const std::string& name, std::int64_t rows, std::int64_t columns) {
  EmbeddingTableConfig config;
  config.name = name;
  config.num_embeddings = rows;
  config.embedding_dim = columns;
  return config;
}

// Rows that so many even ids touch.
double touched(double rows, double ids) { return rows * (1 - std::pow(1 - 1 / rows, ids)); }

double batch_bytes(const ShardCost& cost) {
  return cost.bytes.input + cost.bytes.activations + cost.bytes.sort;
}

std::vector<ShardCost> costs_of(const EmbeddingTableConfig& one, const sharding::Placement& wish,
                                const Topology& topology, double ids = 2, std::int64_t batch = 10) {
  PlanRequest request;
  request.num_ranks = topology.world_size;
  request.ranks_per_host = topology.local_size;
  request.batch = batch;
  request.rank.speeds = kUnit;
  const auto plan = sharding::make_module_plan({one}, {{one.name, wish}}, topology);
  return planner::cost_of(problem_of({one}, {ids}, request), planner_plan(plan));
}

TEST(PlanCost, TableWiseIsAllOnOneRank) {
  const auto costs = costs_of(table("a", 1000, 32), sharding::table_wise(1), {2, 2});
  const ShardCost& owner = costs[1];
  EXPECT_EQ(owner.bytes.weights, 1000 * 32 * 4);
  EXPECT_EQ(owner.bytes.optimizer, 1000 * 4);  // one number per row
  // Ids and lengths of two batches, 20 rows each way, and 16 bytes an id to sort them.
  EXPECT_EQ(batch_bytes(owner), 2 * (40 * 8 + 20 * 4) + 2 * 20 * 32 * 4 + 40 * 16);
  // Half of everything is the other rank's.
  EXPECT_DOUBLE_EQ(owner.seconds.ids, (20 * 8 + 10 * 4) * 1e3);
  EXPECT_DOUBLE_EQ(owner.seconds.lookup, 40 * 128);
  EXPECT_DOUBLE_EQ(owner.seconds.rows, 10 * 128 * 1e3);
  EXPECT_DOUBLE_EQ(owner.seconds.gradients, owner.seconds.rows);
  EXPECT_NEAR(owner.seconds.step, 40 * 128 + 2 * touched(1000, 40) * (128 + 4), 1e-6);
  EXPECT_EQ(costs[0].seconds.total(), 0);
  EXPECT_EQ(costs[0].bytes.total(), 0);
}

TEST(PlanCost, OneRankSendsNothing) {
  const auto costs = costs_of(table("a", 5, 4), sharding::row_wise(), {1, 1});
  EXPECT_EQ(costs[0].seconds.ids + costs[0].seconds.rows + costs[0].seconds.gradients, 0);
  // Rows narrower than a cache line cost a line.
  EXPECT_DOUBLE_EQ(costs[0].seconds.lookup, 20 * 64);
  EXPECT_NEAR(costs[0].seconds.step, 20 * 16 + 2 * touched(5, 20) * (16 + 4), 1e-9);
}

TEST(PlanCost, RowWiseSharesIdsButNotSums) {
  const auto costs = costs_of(table("a", 10, 32), sharding::row_wise(), {4, 4});
  // 3, 3, 3 and 1 rows: ids by rows, sums of every sample from every rank.
  EXPECT_DOUBLE_EQ(costs[0].seconds.lookup, 80 * 0.3 * 128);
  EXPECT_DOUBLE_EQ(costs[3].seconds.lookup, 80 * 0.1 * 128);
  EXPECT_DOUBLE_EQ(costs[0].seconds.rows, 30 * 128 * 1e3);
  EXPECT_DOUBLE_EQ(costs[3].seconds.rows, costs[0].seconds.rows);
  // 5 rows on 4 ranks leave one empty: it has nothing to do.
  const auto few = costs_of(table("a", 5, 32), sharding::row_wise(), {4, 4});
  EXPECT_EQ(few[3].bytes.weights, 0);
  EXPECT_EQ(few[3].seconds.total(), 0);
}

TEST(PlanCost, ColumnWiseSharesColumnsButNotIds) {
  const auto costs = costs_of(table("a", 100, 64), sharding::column_wise({0, 1}), {2, 2});
  EXPECT_DOUBLE_EQ(costs[0].seconds.lookup, 40 * 128);
  EXPECT_DOUBLE_EQ(costs[0].seconds.ids, (20 * 8 + 10 * 4) * 1e3);
  EXPECT_DOUBLE_EQ(costs[0].seconds.rows, 10 * 128 * 1e3);
  EXPECT_EQ(costs[0].bytes.optimizer, 100 * 4);  // each part has its own number per row
}

TEST(PlanCost, HostsSumBeforeTheyCross) {
  const Topology two_hosts{4, 2};
  const auto over_all = costs_of(table("a", 100, 32), sharding::row_wise(), two_hosts);
  // 40 samples: 10 of the neighbour over the host, 20 over the network.
  EXPECT_DOUBLE_EQ(over_all[0].seconds.rows, 10 * 128 * 1e3 + 20 * 128 * 1e6);
  const auto one_host = costs_of(table("a", 100, 32), sharding::table_row_wise(1), two_hosts);
  EXPECT_DOUBLE_EQ(one_host[2].seconds.rows, 20 * 128 * 1e3 + 10 * 128 * 1e6);
  EXPECT_EQ(one_host[0].seconds.total(), 0);
  EXPECT_DOUBLE_EQ(one_host[2].seconds.lookup, 40 * 128);
}

TEST(PlanCost, ReplicasExchangeGradientsOnly) {
  const auto fused_wish = sharding::data_parallel().with_kernel(sharding::ComputeKernel::kFused);
  const auto fused = costs_of(table("a", 1000, 32), fused_wish, {2, 2});
  EXPECT_EQ(fused[0].seconds.ids + fused[0].seconds.rows, 0);
  // The rows that were touched.
  EXPECT_NEAR(fused[0].seconds.gradients, touched(1000, 20) * (8 + 128) * 1e3, 1e-3);
  EXPECT_NEAR(fused[0].seconds.step, 40 * 128 + 2 * touched(1000, 40) * (128 + 4), 1e-6);
  const auto dense = costs_of(table("a", 1000, 32), sharding::data_parallel(), {2, 2});
  EXPECT_DOUBLE_EQ(dense[0].seconds.gradients, 1000 * 128 * 1e3);  // all rows
  // State, and gradients: a new one, the last one, and what ranks sum them in.
  EXPECT_EQ(dense[0].bytes.optimizer, 1000 * 4 + 3 * 1000 * 128);
  EXPECT_EQ(dense[1].bytes.total(), dense[0].bytes.total());
}

TEST(PlanCost, SequencesSendARowPerId) {
  EmbeddingTableConfig one = table("a", 1000, 32);
  one.pooling = embedding::PoolingType::kNone;
  const auto costs = costs_of(one, sharding::row_wise(), {2, 2}, 3);
  // 30 ids of each rank, half of the rows here: 30 rows, half of them for the other.
  EXPECT_DOUBLE_EQ(costs[0].seconds.rows, 15 * 128 * 1e3);
}

// The rows of its own samples and their gradients are on every rank, whatever it holds.
TEST(PlanCost, OwnSamplesAreOnEveryRank) {
  PlanRequest request;
  request.batch = 10;
  const planner::Problem problem = problem_of({table("a", 1000, 32)}, {2}, request);
  EXPECT_EQ(planner::CostModel(problem).own_bytes(), 2 * 10 * 32 * 4);
}

// Norms of rows are exact in trainings, so parts of columns sum gradients before their step.
TEST(PlanCost, PartsOfColumnsMergeTheirGradients) {
  PlanRequest request;
  request.num_ranks = request.ranks_per_host = 2;
  request.batch = 10;
  request.rank.speeds.merge_seconds = 1;
  const EmbeddingTableConfig one = table("a", 1000, 32);
  const planner::Problem problem = problem_of({one}, {2}, request);
  const auto step_of = [&](const sharding::Placement& wish) {
    const auto plan = sharding::make_module_plan({one}, {{"a", wish}}, {2, 2});
    return planner::cost_of(problem, planner_plan(plan))[0].seconds.step;
  };
  EXPECT_NEAR(step_of(sharding::column_wise({0, 1})), touched(1000, 40), 1e-3);
  EXPECT_LT(step_of(sharding::table_wise(0)), 1e-3);
}

TEST(PlanCost, EveryTableNeedsItsIds) {
  const EmbeddingTableConfig one = table("a", 10, 4);
  try {
    problem_of({one}, {}, PlanRequest{});
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "dlrm.problem_of: there are 1 tables and the ids of 0.");
  }
}

}  // namespace
}  // namespace tessera::workloads::dlrm
