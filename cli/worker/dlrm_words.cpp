#include "worker/dlrm_words.h"

#include "dlrm/training.h"
#include "report/run_folder.h"
#include "tessera/core/check.h"

namespace tessera::cli {

namespace report = workloads::report;
namespace dlrm = workloads::dlrm;

embedding::OptimizerKind table_optimizer_of(const std::string& name) {
  using Kind = embedding::OptimizerKind;
  if (name == "adagrad") return Kind::kAdagrad;
  if (name == "rowwise_adagrad") return Kind::kRowWiseAdagrad;
  if (name == "adam") return Kind::kAdam;
  if (name == "partial_rowwise_adam") return Kind::kPartialRowWiseAdam;
  return Kind::kSgd;
}

dlrm::LogOptions log_options(const TrainDlrmWords& words) {
  dlrm::LogOptions options;
  options.num_tables = words.num_tables;
  options.num_rows = words.num_rows;
  options.bag_size = words.bag_size;
  options.seed = static_cast<std::uint64_t>(words.seed);
  return options;
}

sharding::ModulePlan plan_of(const std::string& verb, const TrainDlrmWords& words,
                             const std::vector<embedding::EmbeddingTableConfig>& tables,
                             const sharding::Topology& topology) {
  if (words.plan.empty()) return dlrm::default_plan(tables, words.sharding, topology);
  const auto plan = sharding::plan_from_json(report::read_text(words.plan));
  const sharding::ModulePlan* own = plan.get_plan_for_module(kModule);
  if (own == nullptr && plan.modules.size() == 1) own = &plan.modules.begin()->second;
  TESSERA_CHECK_VALUE(own != nullptr, verb, ": ", words.plan, " has ", plan.modules.size(),
                      " modules, none of them '", kModule, "'.");
  sharding::check_module_plan(verb, tables, *own, topology);
  return *own;
}

}  // namespace tessera::cli
