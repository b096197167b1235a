// cli/worker/plan_text.h — a plan of tables and its costs, for people and for programs.

#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/embedding/config.h"
#include "tessera/planner/cost.h"
#include "tessera/sharding/plan.h"

namespace tessera::cli {

/// What a plan asks of a rank, by the planner's costs.
struct RankBytes {
  double weights = 0;
  double optimizer = 0;  // state, and gradients of kernel `dense`
  double batch = 0;      // ids, rows, their gradients, and work space, if all are held at once
  double total() const noexcept { return weights + optimizer + batch; }
};

struct RankCost {
  RankBytes bytes;
  planner::Seconds seconds;
};

/// Bytes of one shard's weights on one rank.
double weight_bytes(const embedding::EmbeddingTableConfig& table, const sharding::Shard& shard);

/// One way to lay the tables, and what it costs. Without costs if it cannot be done.
struct PlanChoice {
  std::string sharding;
  sharding::ModulePlan plan;
  std::vector<RankCost> costs;
  double step_seconds = 0;  // by the problem's objective
  std::string obstacle;     // why it cannot be done

  double largest_rank() const;  // bytes
  double slowest_rank() const;  // seconds
};

/// All that is shown.
struct PlanSubjectTables {
  std::vector<embedding::EmbeddingTableConfig> tables;
  sharding::Topology topology;
  planner::Problem problem;   // the tables in the same order
  std::string speeds_origin;  // "assumed", "measured" or "given"
  double memory = 0;          // bytes of a rank; 0: no limit
  double budget = 0;          // the part of it that tables may have
  double bound = 0;           // seconds that no plan is under; 0: there is no plan
  PlanChoice chosen;
  std::vector<PlanChoice> others;  // all shardings that have a name

  bool fits(const PlanChoice& choice) const {
    return choice.obstacle.empty() && (memory == 0 || choice.largest_rank() <= budget);
  }

  /// Share by which a step is longer than the bound. Negative where the bound says nothing: of a
  /// plan that does not fit, or that the planner may not make (a table with the kernel dense).
  double gap(const PlanChoice& choice) const {
    return fits(choice) && bound > 0 ? choice.step_seconds / bound - 1 : -1;
  }
};

/// Lines of at most 100 columns.
std::string plan_text(const PlanSubjectTables& subject);
nlohmann::ordered_json plan_json(const PlanSubjectTables& subject);

}  // namespace tessera::cli
