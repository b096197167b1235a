// data/read_table.h — tables of text as samples of a click log, by a schema. No LibTorch.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "data/schema.h"
#include "dlrm/click_log.h"

namespace tessera::workloads::data {

struct TableOptions {
  /// Leave bad records out and count them, instead of throwing for the first.
  bool skips_bad = false;
  /// Records have no label: it counts as 0.
  bool has_no_label = false;
  /// The same for files without that column.
  bool label_may_miss = false;
  /// How many bad records are remembered.
  std::int64_t num_named = 5;
  /// Records to read at most; -1 for all.
  std::int64_t most = -1;
  /// Ids of all 64 bits: whole numbers as they are, all other values by `raw_id`. Rows of the
  /// schema are not read.
  bool raw_ids = false;
  /// Told of every text that became an id by `raw_id`.
  std::function<void(std::string_view text, std::int64_t id)> sees_text = nullptr;
  /// Samples handed over at a time.
  std::int64_t block_samples = 8192;
  /// The end of the last file is not the end; see Input.
  std::function<bool()> goes_on = nullptr;
};

/// What was read and what was left out.
struct TableReport {
  std::int64_t num_records = 0;
  std::int64_t num_samples = 0;
  std::int64_t num_bad = 0;
  std::int64_t num_bytes = 0;            // of the files, packed as they are
  std::vector<std::string> first_bad{};  // file, line, column and reason
};

/// Reads the files one after the other, each with its own line of column names, and hands over
/// blocks of samples in order. Throws DataError, naming file, line and column, for what cannot be
/// read; cells that do not fit and records with too few or too many cells are bad records.
TableReport read_tables(const std::vector<std::string>& paths, const Schema& schema,
                        const TableOptions& options,
                        const std::function<void(dlrm::SampleBlock&)>& take);

/// The same for a table that is open; `name` is named in what is thrown.
class ColumnSource;
TableReport read_columns(ColumnSource& source, const std::string& name, const Schema& schema,
                         const TableOptions& options,
                         const std::function<void(dlrm::SampleBlock&)>& take);

/// Guesses a schema from the first records of a file, as a text in TOML with comments that say what
/// was seen, for people to edit.
std::string guess_schema(const std::string& path);

/// The format and the separator of a text, by its beginning. Throws DataError for a JSON array.
struct TextFormat {
  Format format = Format::kCsv;
  char separator = ',';
};
TextFormat text_format(const Schema& schema, const Input& input);

}  // namespace tessera::workloads::data
