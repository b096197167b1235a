// cli/bench_serve.h — tessera bench serve: load for a server, at times of its own.

#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// Runs `tessera bench serve` with these words.
int bench_serve(const std::vector<std::string>& words);

/// Its long flags.
std::vector<std::string> bench_serve_flags();

}  // namespace tessera::cli
