#include "dlrm/from_settings.h"

#include "dlrm/training.h"
#include "report/run_folder.h"
#include "tessera/core/check.h"

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
  return options;
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
