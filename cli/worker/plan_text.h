// cli/worker/plan_text.h — a plan of tables and its costs, for people and for programs.

#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "dlrm/plan_cost.h"

namespace tessera::cli {

/// One way to lay the tables, and what it costs. Without costs if it cannot be done.
struct PlanChoice {
  std::string sharding;
  sharding::ModulePlan plan;
  std::vector<workloads::dlrm::RankCost> costs;
  std::string obstacle;  // why it cannot be done

  double largest_rank() const;  // bytes
  double slowest_rank() const;  // seconds
};

/// All that is shown.
struct PlanSubjectTables {
  std::vector<embedding::EmbeddingTableConfig> tables;
  sharding::Topology topology;
  workloads::dlrm::StepLoad load;
  workloads::dlrm::Bandwidths bandwidths;
  std::string speeds_origin;  // "assumed", "measured" or "given"
  double memory = 0;          // bytes of a rank; 0: no limit
  double budget = 0;          // the part of it that tables may have
  PlanChoice chosen;
  std::vector<PlanChoice> others;  // all shardings that have a name

  bool fits(const PlanChoice& choice) const {
    return choice.obstacle.empty() && (memory == 0 || choice.largest_rank() <= budget);
  }
};

/// Lines of at most 100 columns.
std::string plan_text(const PlanSubjectTables& subject);
nlohmann::ordered_json plan_json(const PlanSubjectTables& subject);

}  // namespace tessera::cli
