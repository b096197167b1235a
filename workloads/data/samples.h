// data/samples.h — cells become parts of a sample; samples gather until a block is full. Private to
// read_table. No LibTorch.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/columns.h"
#include "data/delimited.h"
#include "data/read_table.h"
#include "data/schema.h"
#include "dlrm/click_log.h"

namespace tessera::workloads::data {

/// What becomes of a column.
struct Role {
  enum class Kind : std::uint8_t { kLabel, kDense, kFeature };
  Kind kind;
  std::size_t number;  // among those of its kind
  std::size_t column;  // of the file
  std::string name;    // of the column
};

/// What a file holds, fit for a terminal.
std::string shown(std::string_view cell);

class Samples {
 public:
  Samples(const Schema& schema, const TableOptions& options,
          const std::function<void(dlrm::SampleBlock&)>& take);

  bool is_missing(std::string_view cell) const {
    if (cell.size() > longest_missing_) return false;
    if (!cell.empty() && !begins_missing_[static_cast<unsigned char>(cell[0])]) return false;
    return std::find(schema_.missing.begin(), schema_.missing.end(), cell) != schema_.missing.end();
  }

  // Each returns false, and what is wrong in `problem()`, for a cell that does not fit.
  bool set(const Role& role, std::string_view cell) {
    switch (role.kind) {
      case Role::Kind::kLabel:
        return set_label(cell);
      case Role::Kind::kDense:
        return set_dense(role.number, cell);
      default:
        return add_cell(role.number, cell);
    }
  }
  /// All cells of a record, whose places the roles name. Returns the role of the first that does
  /// not fit, or nothing.
  const Role* set_all(const std::vector<Role>& roles, const std::vector<std::string_view>& cells);
  bool set_nothing(const Role& role);  // null
  bool set(const Role& role, const Column& column, std::int64_t row);
  bool add_value(std::size_t feature, std::string_view value);  // one of several

  const std::string& problem() const { return problem_; }
  bool fail(std::string text) {
    problem_ = std::move(text);
    return false;
  }

  /// The sample is whole.
  void finish();
  /// Takes back what has been set since the last one.
  void drop();
  /// All rows of these columns, column by column: the same as row by row, and faster. False, and
  /// nothing is changed, if one of them does not fit: row by row says which and why.
  bool add_columns(const std::vector<Role>& roles, const std::vector<Column>& columns,
                   std::int64_t num_rows);
  /// The same for records of a text.
  bool add_cells(const std::vector<Role>& roles, const CellRun& run);
  void flush();
  /// So many more, and the block is full.
  std::size_t room() const {
    return static_cast<std::size_t>(options_.block_samples - block_.num_samples);
  }
  std::int64_t num_samples() const { return num_samples_; }

 private:
  struct Bags {
    std::vector<std::int32_t> lengths;
    std::vector<std::int64_t> ids;
    std::size_t kept = 0;                                       // ids of samples that are whole
    std::unordered_map<std::string_view, std::int64_t> rows{};  // of a vocabulary
  };
  /// What became of the values of a column's dictionary, for the rows that have the same.
  struct Known {
    struct Part {
      std::uint32_t begin = 0;   // among `ids`
      std::int32_t length = -1;  // below 0 where no row had it yet
    };
    std::shared_ptr<const Column> dictionary{};
    std::vector<Part> parts{};
    std::vector<std::int64_t> ids{};
  };

  /// Its ids are taken as they are.
  bool is_raw(const FeatureColumn& column) const { return options_.raw_ids || column.grows; }
  std::int64_t id_of_text(std::string_view text) const {
    const std::int64_t id = raw_id(text);
    if (options_.sees_text) options_.sees_text(text, id);
    return id;
  }
  bool set_label(std::string_view cell);
  bool set_dense(std::size_t number, std::string_view cell);
  bool add_cell(std::size_t feature, std::string_view cell);
  bool add_id(std::size_t feature, std::int64_t id);
  bool keep_dense(std::size_t number, double value);

  template <class Add>
  bool add_all(std::int64_t num_rows, const Add& add);
  bool add_cell_column(const Role& role, const CellRun& run);
  bool add_dense_cells(const Role& role, const CellRun& run);
  bool add_hashed_cells(const Role& role, const CellRun& run);
  bool add_whole_cells(const Role& role, const CellRun& run);
  bool add_bags_of_hashes(const Role& role, const CellRun& run);
  bool keep_numbers(std::size_t number, std::size_t first, std::vector<double>& values);
  bool add_column(const Role& role, const Column& column, std::int64_t num_rows);
  template <class T>
  bool add_numbers(const Role& role, const Column& column, const T* values);
  bool add_ids(std::size_t feature, const Column& column);
  bool add_texts(std::size_t feature, const Column& column);
  bool add_known_texts(std::size_t feature, const Column& column);
  bool add_labels(const Column& column);

  const Schema& schema_;
  const TableOptions& options_;
  const std::function<void(dlrm::SampleBlock&)>& take_;
  std::size_t longest_missing_ = 0;
  std::array<bool, 256> begins_missing_{};  // first bytes of texts that stand for no value
  bool misses_numbers_ = false;             // a number may stand for no value
  float label_ = 0;
  std::vector<float> dense_;
  std::vector<Bags> features_;
  std::vector<Known> known_;  // of each feature
  dlrm::SampleBlock block_;
  std::int64_t num_samples_ = 0;
  std::string problem_;
  std::vector<double> numbers_;  // of one column, as they are read
};

}  // namespace tessera::workloads::data
