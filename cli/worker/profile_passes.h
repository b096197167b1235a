// cli/worker/profile_passes.h — whole passes over tables, as trainings do them, for a profile.

#pragma once

#include <vector>

#include "measuring.h"
#include "tessera/comm/group.h"
#include "tessera/planner/machine_profile.h"

namespace tessera::cli {

/// How many things `measure_passes` measures.
int num_passes(const comm::Group& group, bool is_quick);

/// Times ids, rows and backward with steps of tables that are cut in every way, for loads of
/// different shapes, even ids and such of which few are asked for often. Collective over the group.
std::vector<planner::Pass> measure_passes(Measuring& seconds, const comm::Group& group,
                                          bool is_quick);

}  // namespace tessera::cli
