// cli/listed_tables.h — tables as a list in a file, for the planner. No LibTorch.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/planner/problem.h"

namespace tessera::cli {

/// Reads {"tables": [{"name": "users", "rows": 1000, "dim": 64, "dtype": "FP32", "pooling": "SUM",
/// "ids": 1}, …]}; the last three may be left out. `name` is the file's, for errors. Throws
/// planner::PlanError(kBadProblem) with the place.
std::vector<planner::Table> listed_tables(std::string_view text, const std::string& name);

}  // namespace tessera::cli
