// cli/workload.h — what `tessera train` has to know about a built-in workload.

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

/// A workload reads its flags here, to find mistakes before anything is started; its ranks, which
/// are `tessera-worker` programs, read them again.
struct Workload {
  std::string_view name;         // after `tessera train`
  std::string_view worker_verb;  // of the ranks
  std::string_view help;
  /// Throws UsageError or LaunchError for words that make no sense. Returns the number of ranks to
  /// start, or 0 if the words asked for something that is done already.
  int (*read)(const std::vector<std::string>& words);
  std::vector<std::string> (*flags)();
};

extern const Workload kDlrmWorkload;
extern const Workload kGnnWorkload;
extern const Workload kLmWorkload;

}  // namespace tessera::cli
