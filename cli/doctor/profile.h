// cli/doctor/profile.h — `tessera doctor --profile`: what the planner should know of this machine.

#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace tessera::cli {

struct ProfileWords {
  std::string out;    // where to keep it; empty: where the planner looks
  int num_ranks = 0;  // of this host; 0: one per usable core, at most 8
  // Of a profile of several hosts: the words that tell `tessera run` of them, and how long it may
  // wait for the others.
  std::vector<std::string> hosts;
  std::chrono::seconds meeting{0};
  bool is_quick = false;
  bool as_json = false;
};

/// Measures with real ranks, at most 20 s, keeps the profile and says what was found; with several
/// hosts, each of which calls it, at most 60 s once all are there. Throws launch::LaunchError if it
/// cannot.
int run_profile(const ProfileWords& words);

}  // namespace tessera::cli
