// cli/plan_subject.h — what `tessera plan` can explain.

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

struct PlanSubject {
  std::string_view name;  // after `tessera plan`
  /// Does it with the words after the name; returns the exit code, if it returns.
  int (*run)(const std::vector<std::string>& words);
  std::vector<std::string> (*flags)();
};

extern const PlanSubject kPlanGraph;
extern const PlanSubject kPlanTables;

}  // namespace tessera::cli
