#include "dlrm/plan_cost.h"

#include <algorithm>

#include "tessera/core/check.h"
#include "tessera/planner/cost.h"

namespace tessera::workloads::dlrm {
namespace {

using embedding::EmbeddingTableConfig;
using embedding::OptimizerKind;

double state_bytes_per_row(OptimizerKind kind, double columns) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return 0;
    case OptimizerKind::kRowWiseAdagrad:
      return 4;
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kLarsSgd:
      return 4 * columns;
    case OptimizerKind::kPartialRowWiseAdam:
    case OptimizerKind::kPartialRowWiseLamb:
      return 4 * columns + 4;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
    case OptimizerKind::kLamb:
      return 8 * columns;
  }
  return 0;
}

}  // namespace

double weight_bytes(const EmbeddingTableConfig& table, const sharding::Shard& shard) {
  return static_cast<double>(shard.rows) * static_cast<double>(shard.columns) *
         embedding::bits_of(table.data_type) / 8.0;
}

std::vector<RankCost> plan_cost(const std::vector<EmbeddingTableConfig>& tables,
                                const sharding::ModulePlan& plan,
                                const sharding::Topology& topology, const StepLoad& load,
                                const Bandwidths& bandwidths) {
  TESSERA_CHECK_VALUE(load.ids_per_sample.size() == tables.size(), "dlrm.plan_cost: there are ",
                      tables.size(), " tables and the ids of ", load.ids_per_sample.size(), ".");
  planner::Problem problem;
  problem.batch = load.batch;
  problem.ranks.assign(static_cast<std::size_t>(topology.world_size),
                       {planner::kNoLimit, bandwidths});
  problem.ranks_per_host = topology.local_size;
  planner::Plan shards;
  double own = 0;  // what a rank gets for its own samples, and its gradient
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const EmbeddingTableConfig& table = tables[i];
    planner::Table one;
    one.name = table.name;
    one.rows = std::max<std::int64_t>(1, table.num_embeddings);
    one.dim = table.embedding_dim;
    one.element_bytes = embedding::bits_of(table.data_type) / 8.0;
    one.is_pooled = table.pooling != embedding::PoolingType::kNone;
    // The ids of all its features together; each makes a row of its own.
    const auto num_features = static_cast<double>(table.features().size());
    one.features.assign(table.features().size(), {load.ids_per_sample[i] / num_features});
    one.state_bytes_per_row = state_bytes_per_row(load.optimizer, 0);
    one.state_bytes_per_element = state_bytes_per_row(load.optimizer, 1) - one.state_bytes_per_row;
    own += 2 * static_cast<double>(load.batch) *
           (one.is_pooled ? num_features : load.ids_per_sample[i]) *
           static_cast<double>(table.embedding_dim) * 4;
    problem.tables.push_back(std::move(one));
    const sharding::ParameterSharding& sharding = plan.at(table.name);
    planner::TablePlan& laid = shards.emplace_back();
    laid.name = table.name;
    laid.cut = planner::cut_of(sharding::name_of(sharding.type));
    laid.kernel = planner::kernel_of(sharding::name_of(sharding.kernel));
    for (const sharding::Shard& shard : sharding.shards) {
      laid.shards.push_back({shard.row, shard.column, shard.rows, shard.columns, shard.rank});
    }
  }
  std::vector<RankCost> costs;
  for (const planner::ShardCost& cost : planner::cost_of(problem, shards)) {
    const planner::Bytes& bytes = cost.bytes;
    costs.push_back(
        {{bytes.weights, bytes.optimizer, bytes.input + bytes.activations + bytes.sort + own},
         cost.seconds});
  }
  return costs;
}

}  // namespace tessera::workloads::dlrm
