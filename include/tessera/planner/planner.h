// tessera/planner/planner.h — a plan, and a proof of how far it is at most from the best one.

#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/planner/bound.h"
#include "tessera/planner/cost.h"
#include "tessera/planner/plan_error.h"
#include "tessera/planner/problem.h"

namespace tessera::planner {

/// Why a table lies as it does: the best of its other ways, at the prices of the bound.
struct Reason {
  Cut next_best = Cut::kTableWise;
  Kernel next_kernel = Kernel::kFused;
  bool has_next = false;
  double dearer = 0;  // share by which that would cost more; negative: less, but it fitted nowhere
};

struct PlanResult {
  Plan plan;  // in order of names
  Certificate certificate;
  std::vector<ShardCost> per_rank;
  std::vector<double> capacities;  // bytes for tables, of each rank
  std::vector<Reason> reasons;     // by table, in the plan's order
  double seconds = 0;              // by the objective
  int tries = 0;                   // of the search
  bool is_cut_short = false;       // there was no time for the rest of the search or of the proof

  /// Share by which the plan is at most slower than the best.
  double gap() const noexcept {
    return certificate.seconds > 0 ? seconds / certificate.seconds - 1 : 0;
  }
};

/// Not collective: equal problems give equal plans, whatever the order of their tables. Throws
/// PlanError: kBadProblem; kRules; kTooLarge with a change that was computed to help.
///
/// `is_late` is asked between tries. Once it says so, the plan is the best so far and says that it
/// was cut short; without one it is kLate. Such plans hang on the clock, so they may differ.
TESSERA_API PlanResult plan(const Problem& problem, const std::function<bool()>& is_late = {});

/// Throws PlanError(kBadEvidence) unless `plan` covers every table once, in the way of its cut,
/// obeys the rules and fits the memory of every rank.
TESSERA_API void check_plan(const Problem& problem, const Plan& plan);

}  // namespace tessera::planner
