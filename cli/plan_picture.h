// cli/plan_picture.h — a plan as a picture.

#pragma once

#include <string>

#include "tessera/planner/planner.h"

namespace tessera::cli {

/// An SVG of three parts: seconds of every rank by phase with the bound as a line, its bytes by
/// part with the limit as a line, and which tables lie where, the darker the longer they take. Over
/// 128 ranks they come in order of their load, and of the tables the longest 64 are drawn.
std::string plan_picture(const planner::Problem& problem, const planner::PlanResult& result);

}  // namespace tessera::cli
