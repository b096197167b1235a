// cli/job_text.h — how jobs that run are shown.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cli {

/// Whole seconds since a time of the system's clock.
int64_t seconds_since(int64_t begin_ns);

/// "0:01:02".
std::string duration_text(int64_t seconds);

/// The words of a program on one line, whatever they hold, of at most `longest` characters.
std::string command_text(const std::vector<std::string>& words, std::size_t longest = 60);

}  // namespace tessera::cli
