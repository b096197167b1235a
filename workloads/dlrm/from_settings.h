// dlrm/from_settings.h — what the settings of `tessera train dlrm` mean to the library.

#pragma once

#include <string>
#include <vector>

#include "dlrm/open_log.h"
#include "dlrm/settings.h"
#include "tessera/embedding/config.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/sharding/plan.h"

namespace tessera::workloads::dlrm {

inline constexpr const char* kModule = "tables";  // of a plan file

embedding::OptimizerKind table_optimizer_of(const std::string& name);

LogOptions log_options(const Settings& settings);

/// The plan of the file that --plan names, checked, or what --sharding asks for. Throws ValueError
/// for one that does not fit the tables or the ranks, report::Error for a file that cannot be read.
sharding::ModulePlan plan_of(const std::string& verb, const Settings& settings,
                             const std::vector<embedding::EmbeddingTableConfig>& tables,
                             const sharding::Topology& topology);

}  // namespace tessera::workloads::dlrm
