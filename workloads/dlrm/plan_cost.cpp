#include "dlrm/plan_cost.h"

#include <algorithm>

#include "tessera/core/check.h"

namespace tessera::workloads::dlrm {
namespace {

using embedding::EmbeddingTableConfig;
using embedding::OptimizerKind;
using sharding::ComputeKernel;
using sharding::ShardingType;

constexpr double kIdBytes = 8;
constexpr double kWireBytes = 4;   // rows and gradients travel as float32
constexpr double kCacheLine = 64;  // a narrower row costs as much

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

/// How ranks reach each other.
class Links {
 public:
  Links(const sharding::Topology& topology, const Bandwidths& bandwidths)
      : world_(topology.world_size), local_(topology.local_size), bandwidths_(bandwidths) {}

  /// Seconds for `bytes` that are for all ranks alike, this one included.
  double spread(double bytes) const {
    return bytes / world_ *
           ((local_ - 1) / bandwidths_.host + (world_ - local_) / bandwidths_.network);
  }
  /// The same for sums that are first made inside a host: 1/L of the bytes leave it.
  double summed_in_host(double bytes) const {
    return bytes * (local_ - 1) / local_ / bandwidths_.host +
           bytes / local_ * (world_ - local_) / world_ / bandwidths_.network;
  }
  /// Seconds for `bytes` that every other rank sends here.
  double from_each(double bytes) const { return spread(bytes * world_); }
  /// Seconds of an all-reduce, over the slowest link.
  double all_reduce(double bytes) const {
    const double slowest = world_ > local_ ? bandwidths_.network : bandwidths_.host;
    return 2 * (world_ - 1) / world_ * bytes / slowest;
  }

 private:
  double world_;
  double local_;
  Bandwidths bandwidths_;
};

/// One table and what a step does with it.
struct TableLoad {
  const EmbeddingTableConfig& table;
  const sharding::ParameterSharding& sharding;
  double ids;  // per rank and step, of all features of the table
};

// Rows that come out per rank and step: one per bag, or one per id.
double num_outputs(const TableLoad& load, std::int64_t batch) {
  if (load.table.pooling == embedding::PoolingType::kNone) return load.ids;
  return static_cast<double>(batch) * static_cast<double>(load.table.features().size());
}

void add_shard(const TableLoad& load, const sharding::Shard& shard, const StepLoad& step,
               double world, const Links& links, double memory, RankCost& cost) {
  const auto rows = static_cast<double>(shard.rows);
  const auto columns = static_cast<double>(shard.columns);
  const double element = embedding::bits_of(load.table.data_type) / 8.0;
  const double state = state_bytes_per_row(step.optimizer, columns);
  const bool is_replica = load.sharding.type == ShardingType::kDataParallel;
  const bool is_dense = load.sharding.kernel == ComputeKernel::kDense;
  cost.bytes.weights += weight_bytes(load.table, shard);
  cost.bytes.optimizer += rows * state + (is_dense ? rows * columns * kWireBytes : 0);

  const double all_rows = std::max(1.0, static_cast<double>(load.table.num_embeddings));
  const double share = is_replica ? 1 : rows / all_rows;
  const double ids = load.ids * (is_replica ? 1 : world) * share;
  const bool is_sequence = load.table.pooling == embedding::PoolingType::kNone;
  const double outputs = rows == 0     ? 0
                         : is_sequence ? ids
                                       : num_outputs(load, step.batch) * (is_replica ? 1 : world);
  const double output_bytes = outputs * columns * kWireBytes;
  cost.seconds.lookup += ids * std::max(columns * element, kCacheLine) / memory;
  if (is_replica) {
    const double touched = std::min(ids, rows);
    cost.seconds.gradients += is_dense
                                  ? links.all_reduce(rows * columns * kWireBytes)
                                  : links.from_each(touched * (kIdBytes + columns * kWireBytes));
    cost.bytes.batch += is_dense ? 0 : world * touched * (kIdBytes + columns * kWireBytes);
  } else {
    const bool sums_in_host = load.sharding.type == ShardingType::kTableRowWise ||
                              load.sharding.type == ShardingType::kGrid;
    const double there = sums_in_host && !is_sequence ? links.summed_in_host(output_bytes)
                                                      : links.spread(output_bytes);
    cost.seconds.ids += links.spread(ids * kIdBytes);
    cost.seconds.rows += there;
    cost.seconds.gradients += there;
    cost.bytes.batch += ids * kIdBytes + 2 * output_bytes;
  }
  // Every id reads the gradient of its bag; every touched row and its state are read and written.
  const double stepped = is_dense ? rows : std::min(ids * (is_replica ? world : 1), rows);
  const double read = ids * (is_replica ? world : 1) * columns * kWireBytes;
  cost.seconds.step += (read + 2 * stepped * (columns * element + state)) / memory;
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
  std::vector<RankCost> costs(static_cast<std::size_t>(topology.world_size));
  const Links links(topology, bandwidths);
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const TableLoad one{tables[i], plan.at(tables[i].name),
                        load.ids_per_sample[i] * static_cast<double>(load.batch)};
    for (const sharding::Shard& shard : one.sharding.shards) {
      add_shard(one, shard, load, topology.world_size, links, bandwidths.memory,
                costs[static_cast<std::size_t>(shard.rank)]);
    }
    // What a rank gets for its own samples, and its gradient.
    const double result = 2 * num_outputs(one, load.batch) *
                          static_cast<double>(tables[i].embedding_dim) * kWireBytes;
    for (RankCost& cost : costs) cost.bytes.batch += result;
  }
  return costs;
}

}  // namespace tessera::workloads::dlrm
