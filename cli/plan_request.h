// cli/plan_request.h — what the words of `tessera plan tables` ask of the planner.

#pragma once

#include "dlrm/table_problem.h"
#include "plan_tables_flags.h"

namespace tessera::cli {

struct WantedPlan {
  workloads::dlrm::PlanRequest request;
  workloads::dlrm::KnownSpeeds known;
  std::string origin;  // of the speeds: "assumed", "measured" or "given"
};

/// Speeds are those of the machine's profile; one that a flag gives wins. Throws
/// planner::PlanError(kBadProblem) for a profile that cannot be used.
inline WantedPlan wanted_plan(const PlanTablesWords& words) {
  WantedPlan wanted;
  wanted.known = workloads::dlrm::known_speeds(words.profile);
  wanted.origin = wanted.known.is_measured ? "measured" : "assumed";
  workloads::dlrm::PlanRequest& request = wanted.request;
  request.num_ranks = words.num_ranks;
  request.ranks_per_host = words.num_ranks / words.num_hosts;
  request.batch = words.batch;
  request.table_optimizer = words.table_optimizer;
  request.reserve = words.reserve;
  if (!words.memory.empty()) request.rank.memory = bytes_of(words.memory);
  planner::Speeds& speeds = request.rank.speeds;
  speeds = wanted.known.speeds;
  if (words.memory_speed > 0) {
    // All of memory's figures were measured together.
    speeds.memory = words.memory_speed * 1e9;
    speeds.step = 0;
    for (const planner::SecondsName& name : planner::kSpeedSeconds) speeds.*(name.seconds) = 0;
  }
  if (words.host_speed > 0) speeds.host = words.host_speed * 1e9;
  if (words.network_speed > 0) speeds.network = words.network_speed * 1e9;
  if (words.memory_speed > 0 && words.host_speed > 0) wanted.origin = "given";
  return wanted;
}

}  // namespace tessera::cli
