// cli/worker/dlrm_words.h — what the words of `tessera train dlrm` mean to the library.

#pragma once

#include <string>
#include <vector>

#include "dlrm/open_log.h"
#include "dlrm_flags.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/sharding/plan.h"

namespace tessera::cli {

inline constexpr const char* kModule = "tables";  // of a plan file

embedding::OptimizerKind table_optimizer_of(const std::string& name);

workloads::dlrm::LogOptions log_options(const TrainDlrmWords& words);

/// The plan of the file that --plan names, checked, or what --sharding asks for. Throws ValueError
/// for one that does not fit the tables or the ranks, report::Error for a file that cannot be read.
sharding::ModulePlan plan_of(const std::string& verb, const TrainDlrmWords& words,
                             const std::vector<embedding::EmbeddingTableConfig>& tables,
                             const sharding::Topology& topology);

}  // namespace tessera::cli
