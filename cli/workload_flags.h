// cli/workload_flags.h — how every workload reads its words.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "flags.h"
#include "usage.h"

namespace tessera::cli {

/// Workload::read for a workload whose words are a `Words` with `define_flags`. `check` throws for
/// words that do not fit together.
template <class Words>
int read_words(const std::vector<std::string>& words, std::string_view help,
               void (*check)(const Words&)) {
  CLI::App app("", "train");
  Words given;
  define_flags(app, given);
  const SplitWords split = split_words(app, words);
  read_flags(app, split.flags);
  if (given.wants_help) return print_help(help);
  if (!split.rest.empty()) throw UsageError("train: takes flags only, not '" + split.rest[0] + "'");
  if (given.print_config) return print_config(app);
  check(given);
  return given.num_ranks;
}

/// Workload::flags for the same.
template <class Words>
std::vector<std::string> flags_of() {
  CLI::App app("", "train");
  Words words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace tessera::cli
