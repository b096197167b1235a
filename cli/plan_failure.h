// cli/plan_failure.h — the planner's refusals as this program tells them.

#pragma once

#include <string>

#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "tessera/planner/plan_error.h"

namespace tessera::cli {

/// Exit code 78 for what is impossible, 65 for what cannot be meant.
inline launch::LaunchError plan_failure(const planner::PlanError& error) {
  using planner::PlanErrorKind;
  const bool is_impossible =
      error.kind() == PlanErrorKind::kTooLarge || error.kind() == PlanErrorKind::kRules;
  const auto or_else = [](const std::string& text, const char* other) {
    return text.empty() ? std::string(other) : text;
  };
  return {is_impossible ? launch::kExitConfiguration : launch::kExitData, error.problem(),
          or_else(error.why(), "the planner cannot use it"),
          or_else(error.advice(), "tessera plan tables --help shows what it takes")};
}

}  // namespace tessera::cli
