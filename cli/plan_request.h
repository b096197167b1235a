// cli/plan_request.h — what the words of `tessera plan tables` ask of the planner.

#pragma once

#include "dlrm/table_problem.h"
#include "plan_tables_flags.h"

namespace tessera::cli {

struct WantedPlan {
  workloads::dlrm::PlanRequest request;
  workloads::dlrm::KnownSpeeds known;
  std::string origin;                // of the speeds: "assumed", "measured" or "given"
  std::vector<std::string> assumed;  // speeds that are neither measured nor given, in words
};

/// Speeds are those of the machine's profile; one that a flag gives wins. Throws
/// planner::PlanError(kBadProblem) for a profile that cannot be used.
inline WantedPlan wanted_plan(const PlanTablesWords& words) {
  WantedPlan wanted;
  planner::Here here;
  here.num_ranks = words.num_ranks / words.num_hosts;
  wanted.known = workloads::dlrm::known_speeds(words.profile, here, words.device == "cuda");
  wanted.origin = wanted.known.is_measured ? "measured" : "assumed";
  wanted.assumed = planner::assumed(wanted.known.profile);
  const auto give = [&](double& speed, double flag, const char* name) {
    if (flag <= 0) return;
    speed = flag * 1e9;
    std::erase(wanted.assumed, name);
  };
  workloads::dlrm::PlanRequest& request = wanted.request;
  request.num_ranks = words.num_ranks;
  request.ranks_per_host = words.num_ranks / words.num_hosts;
  request.batch = words.batch;
  request.table_optimizer = words.table_optimizer;
  request.reserve = words.reserve;
  if (!words.memory.empty()) request.rank.memory = bytes_of(words.memory);
  planner::Speeds& speeds = request.rank.speeds;
  speeds = wanted.known.speeds;
  give(speeds.memory, words.memory_speed, "memory");
  give(speeds.host, words.host_speed, "links in a host");
  give(speeds.network, words.network_speed, "links between hosts");
  if (words.memory_speed > 0) {
    // All of memory's figures were measured together.
    speeds.step = 0;
    for (const planner::SecondsName& name : planner::kSpeedSeconds) speeds.*(name.seconds) = 0;
  }
  if (words.memory_speed > 0 && words.host_speed > 0) wanted.origin = "given";
  return wanted;
}

/// What is wanted least, and how long it is searched for.
inline void set_search(const PlanTablesWords& words, planner::Problem& problem) {
  problem.objective =
      words.objective == "sum" ? planner::Objective::kSum : planner::Objective::kPhases;
  problem.tries = words.effort == "low" ? 8 : words.effort == "high" ? 4096 : 64;
}

}  // namespace tessera::cli
