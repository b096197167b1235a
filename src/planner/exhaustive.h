// planner/exhaustive.h — all plans of a small problem.

#pragma once

#include <optional>

#include "planner/packing.h"

namespace tessera::planner {

/// The best plan that is faster than `seconds`, if the problem is so small that all can be tried.
std::optional<Packing> search_exhaustively(const Options& options, bool is_sum, double seconds);

}  // namespace tessera::planner
