// report/comparison.h — two runs beside each other: their settings, figures and curves.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "report/run_record.h"

namespace tessera::workloads::report {

/// A line of a comparison; a value that one run does not have is empty.
struct Difference {
  std::string name;
  std::string first;
  std::string second;
};

/// Settings of config.toml that are not the same, in the order of the first run. `runs`, `save` and
/// `resume`, which name folders, are left out. Throws launch::LaunchError for a line that is no
/// setting.
std::vector<Difference> setting_differences(const RunRecord& first, const RunRecord& second);

/// The figures of both: status, steps, the last and the best evaluation, speed, memory.
std::vector<Difference> figure_rows(const RunRecord& first, const RunRecord& second);

/// The last evaluation of a run as names and numbers.
std::vector<std::pair<std::string, double>> figures_of(const EvalRow& row);

/// A page like a report, with the curves of both runs in one picture each.
std::string make_comparison(const RunRecord& first, const RunRecord& second);

}  // namespace tessera::workloads::report
