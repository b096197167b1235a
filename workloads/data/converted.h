// data/converted.h — tables as logs without a step by hand: converted once, found again later. No
// LibTorch.

#pragma once

#include <string>

#include "data/read_table.h"

namespace tessera::workloads::data {

/// Where tables that were converted are kept: TESSERA_CACHE, or tessera below XDG_CACHE_HOME or
/// ~/.cache. Its files can be removed at any time.
std::string cache_folder();

/// The log of the tables that `names` stands for (files and patterns, separated by commas), by the
/// schema in the file `schema`: a name in the cache that is another one if a file or the schema has
/// changed. Says nothing about whether it is there. Throws DataError.
std::string converted_path(const std::string& names, const std::string& schema,
                           const TableOptions& options = {});

struct Converted {
  std::string path;     // of the log
  bool is_new = false;  // it was made just now
  TableReport report;   // if it was
};

/// Makes that log if it is not there. Safe against other programs that do the same. Throws
/// DataError.
Converted convert_once(const std::string& names, const std::string& schema,
                       const TableOptions& options = {});

/// Converts the table of text that standard input holds, to its end. Its log stays in the cache
/// under a name that says what it holds, so that the same table twice is one log. Throws DataError.
Converted convert_standard_input(const std::string& schema);

/// Whether a file has to be converted: it is there, and no click log.
bool is_table(const std::string& name);

/// Whether the schemas of two logs give the same samples for the same records: they may differ in
/// how a text is written.
bool is_same_meaning(const std::string& one, const std::string& other);

}  // namespace tessera::workloads::data
