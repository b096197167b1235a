// dlrm/open_raw.h — a log whose ids are any 64 bits, by its name on the command line. No LibTorch.

#pragma once

#include <string>

#include "dlrm/open_log.h"

namespace tessera::workloads::dlrm {

/// "synthetic", a file of `tessera data convert` or a text in Criteo's format, whose ids stay as
/// they are; or a table by the schema in the file `schema`, or by a guess without one, whose texts
/// become ids by their hash. Throws DataError.
OpenedLog open_raw(const std::string& name, const std::string& schema, LogOptions options);

}  // namespace tessera::workloads::dlrm
