// dlrm/open_log.h — a click log by its name on the command line. No LibTorch.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dlrm/click_log.h"
#include "dlrm/synthetic.h"
#include "dlrm/text_blocks.h"

namespace tessera::workloads::dlrm {

struct LogOptions {
  std::int64_t num_tables = 26;    // synthetic
  std::int64_t num_rows = 100000;  // of each table; a binary file knows its own
  std::int64_t bag_size = 1;       // synthetic
  std::uint64_t seed = 1;          // synthetic
  /// Of packed texts, as CriteoOptions has it.
  std::function<ReadText(const std::string& path)> unpack = nullptr;
  /// The files that `names` stands for, in order; none: the one it is.
  std::function<std::vector<std::string>(const std::string& names)> files = nullptr;
};

struct OpenedLog {
  std::shared_ptr<const ClickLog> log;
  std::shared_ptr<const SyntheticLog> synthetic;  // the same, if it is one
  std::string notes;                              // lines about bad input, or nothing
};

/// "synthetic", a file of `tessera data convert`, or a text in Criteo's format: which of the two a
/// file is, its first bytes say. `names` may stand for several texts, read one after the other. Bad
/// lines of a text are left out, counted and named in `notes`. Throws DataError.
OpenedLog open_log(const std::string& names, const LogOptions& options);

}  // namespace tessera::workloads::dlrm
