#include "dlrm/from_settings.h"

#include <nlohmann/json.hpp>

#include "data/input.h"
#include "dlrm/training.h"
#include "report/run_folder.h"
#include "tessera/core/check.h"
#include "tessera/planner/explain.h"
#include "tessera/planner/planner.h"

namespace tessera::workloads::dlrm {

embedding::OptimizerKind table_optimizer_of(const std::string& name) {
  using Kind = embedding::OptimizerKind;
  if (name == "adagrad") return Kind::kAdagrad;
  if (name == "rowwise_adagrad") return Kind::kRowWiseAdagrad;
  if (name == "adam") return Kind::kAdam;
  if (name == "partial_rowwise_adam") return Kind::kPartialRowWiseAdam;
  return Kind::kSgd;
}

LogOptions log_options(const Settings& settings) {
  LogOptions options;
  options.num_tables = settings.num_tables;
  options.num_rows = settings.num_rows;
  options.bag_size = settings.bag_size;
  options.seed = static_cast<std::uint64_t>(settings.seed);
  options.unpack = data::unpacking;
  options.files = data::files_of;
  return options;
}

planner::Problem problem_of(const std::vector<embedding::EmbeddingTableConfig>& tables,
                            const std::vector<double>& ids_per_sample, const PlanRequest& request) {
  TESSERA_CHECK_VALUE(ids_per_sample.size() == tables.size(), "dlrm.problem_of: there are ",
                      tables.size(), " tables and the ids of ", ids_per_sample.size(), ".");
  std::vector<planner::Table> listed;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    planner::Table table;
    table.name = tables[i].name;
    table.rows = tables[i].num_embeddings;
    table.dim = tables[i].embedding_dim;
    table.element_bytes = embedding::bits_of(tables[i].data_type) / 8.0;
    table.is_pooled = tables[i].pooling != embedding::PoolingType::kNone;
    table.features[0].ids = ids_per_sample[i];
    listed.push_back(std::move(table));
  }
  return table_problem(std::move(listed), request);
}

std::string planner_answer(const planner::Problem& problem) {
  nlohmann::json answer;
  try {
    answer = {{"plan", planner::plan_json(planner::plan(problem).plan, kModule)}};
  } catch (const planner::PlanError& error) {
    // In one line, which the launcher shows as the reason.
    answer = {{"error", error.problem().substr(error.problem().find(' ') + 1) +
                            (error.why().empty() ? "" : "; " + error.why()) +
                            (error.advice().empty() ? "." : ". Try " + error.advice() + ".")}};
  }
  return answer.dump();
}

sharding::ModulePlan plan_from_answer(const std::string& verb, const std::string& answer,
                                      const std::vector<embedding::EmbeddingTableConfig>& tables,
                                      const sharding::Topology& topology) {
  const nlohmann::json value = nlohmann::json::parse(answer);
  TESSERA_CHECK_VALUE(!value.contains("error"), verb, ": ", value.value("error", std::string()));
  const sharding::ShardingPlan all = sharding::plan_from_json(value["plan"].get<std::string>());
  const sharding::ModulePlan& plan = all.modules.at(kModule);
  sharding::check_module_plan(verb, tables, plan, topology);
  return plan;
}

planner::Plan planner_plan(const sharding::ModulePlan& plan) {
  planner::Plan laid;
  for (const auto& [name, table] : plan) {
    planner::TablePlan& one = laid.emplace_back();
    one.name = name;
    one.cut = planner::cut_of(sharding::name_of(table.type));
    one.kernel = planner::kernel_of(sharding::name_of(table.kernel));
    for (const sharding::Shard& shard : table.shards) {
      one.shards.push_back({shard.row, shard.column, shard.rows, shard.columns, shard.rank});
    }
  }
  return laid;
}

PlanFigures figures_of(const planner::Problem& problem, const sharding::ModulePlan& plan) {
  PlanFigures figures;
  figures.per_rank = planner::cost_of(problem, planner_plan(plan));
  figures.seconds = planner::step_seconds(problem, figures.per_rank);
  // A plan that is given may ask for more memory than the planner would.
  planner::Problem free = problem;
  for (planner::Rank& rank : free.ranks) rank.memory = planner::kNoLimit;
  figures.bound = planner::lower_bound(planner::enumerate(free)).certificate.seconds;
  return figures;
}

bool is_planned(const Settings& settings) {
  return settings.plan.empty() && settings.sharding == "auto";
}

sharding::ModulePlan plan_of(const std::string& verb, const Settings& settings,
                             const std::vector<embedding::EmbeddingTableConfig>& tables,
                             const sharding::Topology& topology) {
  if (settings.plan.empty()) return default_plan(tables, settings.sharding, topology);
  const auto plan = sharding::plan_from_json(report::read_text(settings.plan));
  const sharding::ModulePlan* own = plan.get_plan_for_module(kModule);
  if (own == nullptr && plan.modules.size() == 1) own = &plan.modules.begin()->second;
  TESSERA_CHECK_VALUE(own != nullptr, verb, ": ", settings.plan, " has ", plan.modules.size(),
                      " modules, none of them '", kModule, "'.");
  sharding::check_module_plan(verb, tables, *own, topology);
  return *own;
}

}  // namespace tessera::workloads::dlrm
