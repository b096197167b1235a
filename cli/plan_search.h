// cli/plan_search.h — `tessera plan tables --search`: the planner, in this program.

#pragma once

#include "plan_tables_flags.h"

namespace tessera::cli {

/// Whether the words ask for the planner. Throws UsageError for words that do not go together.
bool wants_search(const PlanTablesWords& words);

/// Plans, prints, and returns the exit code. Throws launch::LaunchError.
int plan_search(const PlanTablesWords& words);

}  // namespace tessera::cli
