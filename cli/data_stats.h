// cli/data_stats.h — `tessera data stats`: what a click log says about its ids, for the planner.

#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// Runs it with the words after `stats`; returns the exit code.
int data_stats(const std::vector<std::string>& words);

/// Its long flags.
std::vector<std::string> data_stats_flags();

}  // namespace tessera::cli
