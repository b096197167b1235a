// cli/worker/profile_passes.h — whole passes over tables, as trainings do them, for a profile.

#pragma once

#include <vector>

#include "tessera/comm/group.h"
#include "tessera/planner/machine_profile.h"

namespace tessera::cli {

/// Times ids, rows and backward with steps of tables that are cut in every way, for loads of
/// different shapes, even ids and such of which few are asked for often. Collective over the group.
std::vector<planner::Pass> measure_passes(const comm::Group& group, double seconds_each,
                                          bool is_quick);

}  // namespace tessera::cli
