// cli/newest_checkpoint.h — where the checkpoints of a folder lie, and the one that is meant.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/checkpoint/reader.h"

namespace tessera::cli {

/// A run folder stands for the checkpoints in it.
std::string root_of(const std::string& folder);

/// The checkpoint of this step, or the newest that can be read if it is negative; says which were
/// passed over. Throws checkpoint::Error(kMissing) if there is none.
std::unique_ptr<checkpoint::Reader> open_newest(const std::string& root, std::int64_t step);

}  // namespace tessera::cli
