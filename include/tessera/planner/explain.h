// tessera/planner/explain.h — plans for people and for programs.

#pragma once

#include <string>
#include <string_view>

#include "tessera/core/export.h"
#include "tessera/planner/planner.h"

namespace tessera::planner {

/// "1.50 GB"
TESSERA_API std::string bytes_text(double bytes);

/// All of a result: {"version": 2, "plan_seconds", "bound_seconds", "gap", "certificate",
/// "tables", "per_rank", …}; docs/planner.md lists the keys.
TESSERA_API std::string to_json(const Problem& problem, const PlanResult& result);

/// Reads the plan and certificate of `to_json` back. Throws PlanError(kBadProblem) with the place.
TESSERA_API PlanResult result_from_json(std::string_view text);

/// The same with what its plan costs for `problem`, so that it can be explained. Throws
/// PlanError(kBadEvidence) as check_plan() does.
TESSERA_API PlanResult result_from_json(std::string_view text, const Problem& problem);

/// The plan alone, as sharding::plan_from_json reads it, for one module.
TESSERA_API std::string plan_json(const Plan& plan, const std::string& module);

/// Three lines: how fast, and how far from the best at most; what takes the time; memory.
TESSERA_API std::string summary(const Problem& problem, const PlanResult& result);

/// Why one table lies as it does, in lines of at most 100 columns. Throws PlanError(kBadProblem)
/// if there is no such table.
TESSERA_API std::string explain(const Problem& problem, const PlanResult& result,
                                const std::string& table);

/// A line a table and a line a rank, at most 100 columns wide.
TESSERA_API std::string table_text(const Problem& problem, const PlanResult& result);

}  // namespace tessera::planner
