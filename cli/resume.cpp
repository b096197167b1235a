#include "resume.h"

#include <cstdio>
#include <filesystem>

#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::cli {
namespace {

std::string shown(const std::string& key, const std::string& value) {
  return "--" + key + " " + (value.empty() ? "\"\"" : value);
}

void append(std::string& list, const std::string& word) {
  list += (list.empty() ? "" : ", ") + word;
}

}  // namespace

void check_is_run(const std::string& folder) {
  if (std::filesystem::exists(folder + "/config.toml")) return;
  throw launch::LaunchError(
      launch::kExitData, "train: there is no run in " + folder,
      folder + "/config.toml, which every run writes, is missing",
      "give --resume a folder that a run has made, such as runs/2026-11-15-1");
}

void compare_with_saved(const std::string& folder, const Settings& saved, const Settings& given,
                        const ResumeRules& rules) {
  std::string was;
  std::string is;
  for (const std::string& key : rules.fixed) {
    if (saved.at(key) == given.at(key)) continue;
    append(was, shown(key, saved.at(key)));
    append(is, shown(key, given.at(key)));
  }
  if (!was.empty()) {
    throw launch::LaunchError(
        launch::kExitConfiguration, "train: " + folder + " has " + was + "; this call has " + is,
        "its checkpoints hold the parameters and the place in the data of that run",
        "leave these flags out, or start a new run without --resume");
  }
  std::string changes;
  for (const std::string& key : rules.told) {
    if (saved.at(key) == given.at(key)) continue;
    append(changes, shown(key, given.at(key)) + " (was " +
                        (saved.at(key).empty() ? "\"\"" : saved.at(key)) + ")");
  }
  if (!changes.empty()) {
    std::fprintf(stderr, "note: train: %s goes on with %s\n", folder.c_str(), changes.c_str());
  }
}

}  // namespace tessera::cli
