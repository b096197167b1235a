// cli/ckpt_ids.h — the ids of a table that grows, out of a checkpoint.

#pragma once

#include <string>

#include "tessera/checkpoint/reader.h"

namespace tessera::cli {

/// Prints id, row, count and last step of every id of a table, as CSV in order of bucket, or writes
/// them to the file `to`: .csv, .npy with an int64 of [ids, 4], or .safetensors with four of [ids].
/// `table` may be left out if one table grows. Throws UsageError for a table that is not there,
/// naming those that are, and for another kind of file; checkpoint::Error for one that cannot be
/// read or written.
void list_ids(const checkpoint::Reader& reader, const std::string& table, const std::string& to);

}  // namespace tessera::cli
