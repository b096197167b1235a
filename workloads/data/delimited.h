// data/delimited.h — tables as text: cells between separators, records on lines. No LibTorch.
//
// A cell that begins with a quote ends with the next quote that is not doubled, and may hold
// separators, ends of lines and doubled quotes in between; quotes elsewhere are plain characters.
// Lines end with LF or CR LF, the last one may do without. A mark for UTF-8 at the beginning is
// left out, and so are empty lines, except where there is one column only.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "data/input.h"

namespace tessera::workloads::data {

class Delimited {
 public:
  /// `input` must outlive it.
  Delimited(Input& input, char separator);

  /// The cells of the next record, which live until the next call; false at the end. Throws
  /// DataError, naming file and line, for quotes that do not fit and records of more than 16 MiB.
  bool next(std::vector<std::string_view>& cells);
  /// So many records in a row of `width` cells each, one after the other; as many as are in memory,
  /// `most` at the most. `lines` says where each began. The views live until the next call. None of
  /// them at the end, and before a record of another width, which `next` gives.
  std::size_t next_alike(std::size_t width, std::size_t most, std::vector<std::string_view>& cells,
                         std::vector<std::int64_t>& lines);
  /// The line on which the last record began, from 1.
  std::int64_t line() const noexcept { return line_; }

 private:
  bool find_record();
  bool find_record_in_memory();
  void take_cells(std::vector<std::string_view>& cells);
  bool fill();
  void scan();
  const char* scan_quoted(const char* at, const char* end);
  std::string_view unquoted(char* begin, char* end);
  [[noreturn]] void fail(const std::string& what) const;

  Input& input_;
  char separator_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0;            // of the record that comes next
  std::size_t size_ = 0;             // bytes in the buffer
  std::size_t scanned_ = 0;          // bytes that were searched for ends of cells
  std::vector<std::uint32_t> ends_;  // of cells, in bytes of the buffer
  std::size_t num_ends_ = 0;
  std::size_t next_end_ = 0;       // the first that belongs to the next record
  std::size_t record_ends_ = 0;    // past the last that belongs to it
  std::size_t searched_ends_ = 0;  // ends that are known to be none of a line
  std::size_t cell_begin_ = 0;     // where the cell begins that is being scanned
  bool is_quoted_ = false;         // it is inside quotes
  bool has_ended_ = false;         // nothing more to read
  std::int64_t line_ = 0;
  std::int64_t next_line_ = 1;
};

/// Lines as they are, for formats that need no cells. The views live until the next call.
class Lines {
 public:
  explicit Lines(Input& input) : input_(input) {}
  bool next(std::string_view& line);
  std::int64_t line() const noexcept { return line_; }

 private:
  Input& input_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0;
  std::size_t size_ = 0;
  bool has_ended_ = false;
  std::int64_t line_ = 0;
};

}  // namespace tessera::workloads::data
