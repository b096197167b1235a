// dlrm/from_settings.h — what the settings of `tessera train dlrm` mean to the library.

#pragma once

#include <string>
#include <vector>

#include "dlrm/open_log.h"
#include "dlrm/settings.h"
#include "dlrm/table_problem.h"
#include "tessera/embedding/config.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/planner/cost.h"
#include "tessera/sharding/plan.h"

namespace tessera::workloads::dlrm {

inline constexpr const char* kModule = "tables";  // of a plan file

embedding::OptimizerKind table_optimizer_of(const std::string& name);

LogOptions log_options(const Settings& settings);

/// Tables of a plan with `ids_per_sample` of each, as a problem for the planner. Throws ValueError
/// unless there is a number of ids for every table.
planner::Problem problem_of(const std::vector<embedding::EmbeddingTableConfig>& tables,
                            const std::vector<double>& ids_per_sample, const PlanRequest& request);

/// The same plan in the planner's terms.
planner::Plan planner_plan(const sharding::ModulePlan& plan);

/// The planner's answer, as text that all ranks read alike with `plan_from_answer`: a plan, or why
/// there is none. Not collective; never throws for a problem without a plan.
std::string planner_answer(const planner::Problem& problem);

/// Throws ValueError where the answer has no plan, with the planner's reason and advice.
sharding::ModulePlan plan_from_answer(const std::string& verb, const std::string& answer,
                                      const std::vector<embedding::EmbeddingTableConfig>& tables,
                                      const sharding::Topology& topology);

/// A plan beside the bound, in the planner's model.
struct PlanFigures {
  std::vector<planner::ShardCost> per_rank;
  double seconds = 0;  // of the slowest rank's tables
  double bound = 0;    // no plan is faster
};
PlanFigures figures_of(const planner::Problem& problem, const sharding::ModulePlan& plan);

/// Whether the planner makes the plan: --sharding is auto, and there is no --plan.
bool is_planned(const Settings& settings);

/// The plan of the file that --plan names, checked, or what --sharding asks for, if it is not auto.
/// Throws ValueError for one that does not fit the tables or the ranks, report::Error for a file
/// that cannot be read.
sharding::ModulePlan plan_of(const std::string& verb, const Settings& settings,
                             const std::vector<embedding::EmbeddingTableConfig>& tables,
                             const sharding::Topology& topology);

}  // namespace tessera::workloads::dlrm
