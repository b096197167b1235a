// cli/data_table.h — `tessera data schema`, and convert and check with one.

#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

struct TableWords {
  std::string schema;
  std::string to;
  bool skips_bad = false;
  bool has_no_label = false;
  bool half = false;
  bool wants_json = false;
};

// Each does what the verb says and returns its exit code; throws DataError.
int guess_schema(const std::string& path, const TableWords& words);
int convert_tables(const std::vector<std::string>& names, const TableWords& words);
int check_tables(const std::vector<std::string>& names, const TableWords& words);

}  // namespace tessera::cli
