// dlrm/rank_machines.h — memory and speeds of all ranks, each as its own machine was measured.

#pragma once

#include <string>
#include <vector>

#include "dlrm/table_problem.h"
#include "tessera/comm/group.h"
#include "tessera/planner/problem.h"
#include "tessera/sharding/plan.h"

namespace tessera::workloads::dlrm {

struct RankMachines {
  std::vector<planner::Rank> ranks;
  /// This rank's, with what is told of all; measured if all ranks' machines were.
  KnownSpeeds known;
};

/// Collective. Every rank reads the profile that its machine keeps; a file that `profile` names is
/// read by rank 0, for all. Machines alike (processor, ranks, engine) have the speeds of the first
/// of them: two measurements of one thing differ, and ranks that are alike are planned better.
/// `memory` is where this rank's tables lie; on GPUs no kept profile counts (`known_speeds`).
///
/// Throws ValueError on all ranks for a profile that cannot be used, and names its rank.
RankMachines rank_machines(const std::string& verb, const std::string& profile,
                           const sharding::Topology& topology, const TableMemory& memory,
                           const comm::Group& world);

}  // namespace tessera::workloads::dlrm
