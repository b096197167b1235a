// data/columns.h — tables that lie column by column: Parquet files, npz archives, and what other
// programs hand over through Arrow's C data interface. No LibTorch, and none of Arrow's headers.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/content.h"

struct ArrowArray;
struct ArrowArrayStream;
struct ArrowSchema;

namespace tessera::workloads::data {

/// Some rows of one column. Whatever it was stored as, it is one of a few kinds here.
struct Column {
  enum class Kind : std::uint8_t {
    kNothing,
    kBool,
    kWhole,
    kReal32,
    kReal64,
    kText,
    kList,
    kOther
  };
  Kind kind = Kind::kNothing;
  std::string type = {};  // kOther: in words, "a timestamp"
  std::int64_t num_rows = 0;
  std::vector<std::uint8_t> is_null = {};    // empty: no row is
  const std::int64_t* wholes = nullptr;      // kWhole, kBool
  const float* reals32 = nullptr;            // kReal32
  const double* reals64 = nullptr;           // kReal64
  std::vector<std::string_view> texts = {};  // kText, and no dictionary
  const std::int32_t* codes = nullptr;  // kText: of the rows that are not null, in `dictionary`
  std::shared_ptr<const Column> dictionary = {};
  std::vector<std::int64_t> begins = {};      // kList: of each row among `items`, and the end
  std::vector<Column> items = {};             // kList: one
  std::vector<std::int64_t> own_wholes = {};  // what had to be made
  std::vector<std::int32_t> own_codes = {};
  std::shared_ptr<const void> memory = {};  // what the pointers point into

  Column() = default;
  Column(Column&&) = default;
  Column& operator=(Column&&) = default;

  bool has(std::int64_t row) const {
    return kind != Kind::kNothing &&
           (is_null.empty() || is_null[static_cast<std::size_t>(row)] == 0);
  }
  /// A cell of kText that is there.
  std::string_view text_at(std::int64_t row) const {
    const auto place = static_cast<std::size_t>(row);
    return codes != nullptr ? dictionary->texts[static_cast<std::size_t>(codes[place])]
                            : texts[place];
  }
  /// A cell that is there and neither a list nor of another kind, as Python writes it into a text:
  /// 3, 3.0, 1e-05, True. `memory` may hold it.
  std::string_view text(std::int64_t row, std::string& memory) const;
};

/// A number as Python writes it.
std::string text_of_real(double value);
std::string text_of_real(float value);

/// Reads a table from its beginning to its end, some rows at a time.
class ColumnSource {
 public:
  virtual ~ColumnSource() = default;
  /// Of all columns.
  virtual const std::vector<std::string>& names() const noexcept = 0;
  /// Only these are read, in this order; all without it. Before the first rows.
  virtual void choose(const std::vector<std::size_t>& columns) = 0;
  /// Columns of equal length, which live until the next call; false at the end. Throws DataError.
  virtual bool next(std::vector<Column>& columns) = 0;
};

/// Opens a file of this kind (kParquet, kZip). Throws DataError, naming it.
std::unique_ptr<ColumnSource> open_columns(const std::string& path, FileKind kind);
std::unique_ptr<ColumnSource> open_parquet(const std::string& path);
std::unique_ptr<ColumnSource> open_npz(const std::string& path);

/// Writes a Parquet file of two columns, "sample" (int64, from 0) and "probability" (float). Whole
/// or not at all. Throws DataError.
void write_scores_parquet(const std::string& path, const std::vector<float>& probabilities);

/// Tables that another program hands over; `name` is named in what is thrown. Takes the stream, and
/// releases it in the end.
std::unique_ptr<ColumnSource> open_stream(ArrowArrayStream& stream, const std::string& name);

/// The texts of a dictionary, for the parts of a table that share it.
struct KnownDictionary {
  const void* offsets = nullptr;  // where it lies
  const void* bytes = nullptr;
  std::int64_t length = -1;
  // Its memory is kept, so that no other dictionary can lie there.
  std::shared_ptr<const Column> texts = {};
};

/// An array of Arrow's C data interface; `memory` keeps it alive. `known` is its dictionary in the
/// part before, if there was one, and then that of this part. Throws DataError for an array that
/// its own description does not fit.
Column column_of(const ArrowSchema& schema, const ArrowArray& array,
                 std::shared_ptr<const void> memory, KnownDictionary* known = nullptr);

}  // namespace tessera::workloads::data
