// cli/worker/table_list.h — tables as a list in a file, for `tessera plan tables`.

#pragma once

#include <string>
#include <vector>

#include "tessera/embedding/config.h"

namespace tessera::cli {

struct ListedTables {
  std::vector<embedding::EmbeddingTableConfig> tables;
  std::vector<double> ids_per_sample;
};

/// Reads {"tables": [{"name": "users", "rows": 1000, "dim": 64, "dtype": "FP32", "pooling": "SUM",
/// "ids": 1}, …]}; the last three may be left out. Throws ValueError that names `path`, the table
/// and the key, report::Error if the file cannot be read.
ListedTables read_table_list(const std::string& path);

}  // namespace tessera::cli
