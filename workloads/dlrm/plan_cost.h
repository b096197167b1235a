// dlrm/plan_cost.h — what a plan asks of every rank: bytes of memory, and the time of a step.
//
// The planner's costs. They are bytes over bandwidth, one part after the other, for ids that are
// spread evenly over the rows. They compare plans; they do not foretell a training, whose parts
// overlap.

#pragma once

#include <cstdint>
#include <vector>

#include "tessera/embedding/config.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/planner/cost.h"
#include "tessera/sharding/plan.h"

namespace tessera::workloads::dlrm {

/// What one step does with the tables.
struct StepLoad {
  std::int64_t batch = 2048;           // samples per rank
  std::vector<double> ids_per_sample;  // of each table, in their order
  embedding::OptimizerKind optimizer = embedding::OptimizerKind::kRowWiseAdagrad;
};

/// Bytes per second of one rank while the others do the same.
using Bandwidths = planner::Speeds;

struct RankBytes {
  double weights = 0;
  double optimizer = 0;  // state, and gradients of kernel `dense`
  double batch = 0;      // ids, rows, their gradients, and work space, if all are held at once
  double total() const noexcept { return weights + optimizer + batch; }
};

using RankSeconds = planner::Seconds;

struct RankCost {
  RankBytes bytes;
  RankSeconds seconds;
};

/// Costs of each rank. Not collective. `plan` must have been checked against `tables` and
/// `topology`. Throws ValueError unless there is a number of ids for every table.
std::vector<RankCost> plan_cost(const std::vector<embedding::EmbeddingTableConfig>& tables,
                                const sharding::ModulePlan& plan,
                                const sharding::Topology& topology, const StepLoad& load,
                                const Bandwidths& bandwidths);

/// Bytes of one shard's weights on one rank.
double weight_bytes(const embedding::EmbeddingTableConfig& table, const sharding::Shard& shard);

}  // namespace tessera::workloads::dlrm
