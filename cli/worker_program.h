// cli/worker_program.h — the program with LibTorch, which does what this one cannot.

#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// Returns the path of `tessera-worker`. Throws launch::LaunchError, naming `verb`, if there is
/// none.
std::string worker_program(const std::string& verb);

/// Executes `tessera-worker` with `words` in place of this program. Throws launch::LaunchError,
/// naming `verb`.
[[noreturn]] void become_worker(const std::string& verb, std::vector<std::string> words);

/// The same with any program; `words[0]` is its path.
[[noreturn]] void become_program(const std::string& verb, std::vector<std::string> words);

}  // namespace tessera::cli
