// launch/program.h — from the words of the command line to something that can be executed.

#pragma once

#include <string>
#include <vector>

#include "tessera/launch/options.h"

namespace tessera::launch {

struct Program {
  std::string path;
  std::vector<std::string> arguments;
};

/// Finds the program, with Python in front of scripts and modules. Throws LaunchError with code 127
/// (not found) or 126 (cannot be executed).
Program resolve_program(const RunOptions& options);

}  // namespace tessera::launch
