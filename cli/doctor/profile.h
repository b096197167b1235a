// cli/doctor/profile.h — `tessera doctor --profile`: what the planner should know of this machine.

#pragma once

#include <string>

namespace tessera::cli {

struct ProfileWords {
  std::string out;    // where to keep it; empty: where the planner looks
  int num_ranks = 0;  // 0: one per usable core, at most 8
  bool is_quick = false;
  bool as_json = false;
};

/// Measures with real ranks, at most 20 s, keeps the profile and says what was found. Throws
/// launch::LaunchError if it cannot.
int run_profile(const ProfileWords& words);

}  // namespace tessera::cli
