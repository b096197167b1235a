// planner/knapsack_bound.h — a sharper bound where few large parts make a rank.

#pragma once

#include "planner/patience.h"
#include "tessera/planner/bound.h"

namespace tessera::planner {

/// Raises the bound if pays for columns refute more than prices alone. `reached` is the time of a
/// plan, which nothing refutes; `budget` limits the work, in steps of the knapsack;
/// a gap of `enough` to `reached` ends it, and so does `patience`.
void sharpen_by_pays(const Options& options, Bound& bound, double reached, double budget,
                     double enough, Patience& patience);

/// Whether the pays of `certificate` refute its seconds.
bool pays_hold(const Options& options, const Certificate& certificate);

}  // namespace tessera::planner
