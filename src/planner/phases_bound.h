// planner/phases_bound.h — a sharper bound where links and memory are waited for apart.

#pragma once

#include "tessera/planner/bound.h"

namespace tessera::planner {

/// Raises the bound of ranks that are alike, for Objective::kPhases only; its choices stay.
void sharpen_for_phases(const Options& options, Bound& bound);

/// Whether the pieces of `certificate` refute everything faster than its seconds.
bool phases_hold(const Options& options, const Certificate& certificate);

}  // namespace tessera::planner
