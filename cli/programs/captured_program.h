// cli/programs/captured_program.h — runs another program and keeps what it says.

#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace tessera::cli {

/// How a program ended and what it said.
struct Outcome {
  int status = 0;  // as waitpid has it
  bool was_started = false;
  bool timed_out = false;
  std::string out;
  std::string err;
};

/// Runs `words`, the first of which is the path, without input, until it ends or `limit` is over;
/// then it is killed.
Outcome run_program(const std::vector<std::string>& words, std::chrono::seconds limit);

}  // namespace tessera::cli
