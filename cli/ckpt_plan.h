// cli/ckpt_plan.h — where the tensors of a checkpoint lie by a plan of its tables.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/convert.h"
#include "tessera/planner/cost.h"

namespace tessera::cli {

struct PlannedTensors {
  int num_ranks = 0;  // that the plan names
  std::map<std::string, std::vector<checkpoint::PlacedRegion>> places;
};

/// Weights of the plan's tables, and what an optimizer keeps for their rows. A table that every
/// rank holds lies with the first. Throws checkpoint::Error(kInvalid) for a table that the
/// checkpoint does not have, or has with another size.
PlannedTensors planned_tensors(const planner::Plan& plan, const checkpoint::Reader& source);

}  // namespace tessera::cli
