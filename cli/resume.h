// cli/resume.h — whether a run can go on with other options than it has had.

#pragma once

#include <map>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "config_file.h"
#include "flags.h"

namespace tessera::cli {

using Settings = std::map<std::string, std::string>;

/// What may change when a run goes on. Flags that are in neither list are free.
struct ResumeRules {
  std::vector<std::string> fixed;  // refused
  std::vector<std::string> told;   // allowed, and named on standard error
};

/// All settings that `words` come to, defaults included.
template <class Words>
Settings settings_of(const std::vector<std::string>& words) {
  CLI::App app("", "train");
  Words given;
  define_flags(app, given);
  read_flags(app, split_words(app, words).flags);
  Settings settings;
  for (const Setting& one : settings_in("train", "config", app.config_to_str(true, false))) {
    settings[one.key] = one.value;
  }
  return settings;
}

/// Throws launch::LaunchError unless `folder` holds a run.
void check_is_run(const std::string& folder);

/// Compares the settings of the run in `folder` with those of the call that goes on with it. Throws
/// launch::LaunchError that names what differs and must not, with both values.
void compare_with_saved(const std::string& folder, const Settings& saved, const Settings& given,
                        const ResumeRules& rules);

}  // namespace tessera::cli
