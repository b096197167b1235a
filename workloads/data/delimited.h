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

/// Records in a row of equally many cells each, one after the other, without a copy. Cell `i` of
/// them all lies at [ends[i - 1] + 1, ends[i]) of `text`, in quotes or not, and with a CR behind it
/// perhaps if it is the last of its record. kBytesAround bytes before and behind every cell can be
/// read.
struct CellRun {
  const char* text = nullptr;
  const std::uint32_t* ends = nullptr;  // [-1] is there, too
  std::size_t width = 0;
  std::size_t num_records = 0;
  std::int64_t first_line = 0;  // records have a line each

  std::string_view cell(std::size_t record, std::size_t column) const {
    const std::size_t i = record * width + column;
    const char* begin = text + static_cast<std::uint32_t>(ends[std::ptrdiff_t(i) - 1] + 1);
    const char* end = text + ends[i];
    if (column + 1 == width && begin < end && end[-1] == '\r') --end;
    if (begin < end && *begin == '"') {
      ++begin;
      --end;
    }
    return {begin, static_cast<std::size_t>(end - begin)};
  }
};

inline constexpr std::size_t kBytesAround = 16;

class Delimited {
 public:
  /// `input` must outlive it.
  Delimited(Input& input, char separator);

  /// The cells of the next record, which live until the next call; false at the end. Throws
  /// DataError, naming file and line, for quotes that do not fit and records of more than 16 MiB.
  bool next(std::vector<std::string_view>& cells);
  /// The next records of `width` cells each and no quotes or ends of lines in cells: as many as are
  /// in memory, `most` at the most. It lives until the next call. None at the end, and before a
  /// record that is not so, which `next` gives.
  CellRun next_run(std::size_t width, std::size_t most);
  /// The line on which the last record began, from 1.
  std::int64_t line() const noexcept { return line_; }

 private:
  bool find_record();
  bool fill();
  void scan();
  const char* scan_quoted(const char* at, const char* end);
  bool is_plain_quoted(const char* quote, const char* end);
  std::string_view unquoted(char* begin, char* end);
  [[noreturn]] void fail(const std::string& what) const;

  char* text() { return buffer_.data() + kBytesAround; }
  void make_room(std::size_t num_bytes);
  std::size_t num_unread() const { return line_ends_.size() - next_line_end_; }

  Input& input_;
  char separator_;
  std::vector<char> buffer_;  // text, and kBytesAround before and behind it
  std::size_t begin_ = 0;     // of the record that comes next
  std::size_t size_ = 0;      // bytes of text
  std::size_t scanned_ = 0;   // bytes that were searched for ends of cells
  // Where cells end, in bytes of the text; the first entry is that of a cell before them all.
  std::vector<std::uint32_t> ends_ = {UINT32_MAX};
  std::size_t num_ends_ = 1;
  std::size_t next_end_ = 1;              // the first that belongs to the next record
  std::vector<std::uint32_t> line_ends_;  // which of them end a record
  std::size_t next_line_end_ = 0;         // that of the next record
  std::vector<std::uint32_t> odd_;  // where cells begin whose text is not what lies in their quotes
  std::size_t next_odd_ = 0;
  std::size_t cell_begin_ = 0;  // where the cell begins that is being scanned
  bool is_quoted_ = false;      // it is inside quotes
  bool has_doubled_ = false;    // and there are two in a row
  bool has_ended_ = false;      // nothing more to read
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
