#include "data/delimited.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cstring>

namespace tessera::workloads::data {
namespace {

constexpr std::size_t kReadBytes = std::size_t{256} << 10;
constexpr std::size_t kMostRecordBytes = std::size_t{16} << 20;
constexpr std::string_view kUtf8Mark = "\xef\xbb\xbf";

#ifdef __SSE2__
// Bits of the bytes that are `wanted`, of 16 in a row.
unsigned equal_bits(__m128i bytes, char wanted) {
  return static_cast<unsigned>(_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(wanted))));
}
#endif

}  // namespace

Delimited::Delimited(Input& input, char separator) : input_(input), separator_(separator) {}

void Delimited::fail(const std::string& what) const {
  throw DataError(input_.name() + ": line " + std::to_string(line_) + " " + what + ".");
}

// Past the quote that ends the cell; the end if it is not there yet.
const char* Delimited::scan_quoted(const char* at, const char* end) {
  for (;;) {
    const auto* quote =
        static_cast<const char*>(std::memchr(at, '"', static_cast<std::size_t>(end - at)));
    if (quote == nullptr) return end;
    // Whether it is doubled, the next byte says.
    if (quote + 1 == end && !has_ended_) return quote;
    if (quote + 1 == end || quote[1] != '"') {
      is_quoted_ = false;
      return quote + 1;
    }
    at = quote + 2;
  }
}

// Finds the ends of cells in what was read and not searched yet.
void Delimited::scan() {
  const char* base = buffer_.data();
  const char* at = base + scanned_;
  const char* end = base + size_;
  ends_.resize(std::max(ends_.size(), num_ends_ + static_cast<std::size_t>(end - at)));
  std::uint32_t* out = ends_.data() + num_ends_;
  std::size_t cell_begin = cell_begin_;
  while (at < end) {
    if (is_quoted_) {
      at = scan_quoted(at, end);
      if (is_quoted_) break;
      continue;
    }
#ifdef __SSE2__
    if (end - at >= 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
      if (equal_bits(bytes, '"') == 0) {
        unsigned bits = equal_bits(bytes, separator_) | equal_bits(bytes, '\n');
        const auto place = static_cast<std::uint32_t>(at - base);
        if (bits != 0) {
          do {
            *out++ = place + static_cast<std::uint32_t>(std::countr_zero(bits));
            bits &= bits - 1;
          } while (bits != 0);
          cell_begin = static_cast<std::size_t>(out[-1]) + 1;
        }
        at += 16;
        continue;
      }
    }
#endif
    // Up to the next quote that means something, or the end of these bytes.
    const char* stop = std::min(end, at + 16);
    for (; at < stop; ++at) {
      const auto place = static_cast<std::size_t>(at - base);
      if (*at == separator_ || *at == '\n') {
        *out++ = static_cast<std::uint32_t>(place);
        cell_begin = place + 1;
      } else if (*at == '"' && place == cell_begin) {
        is_quoted_ = true;
        ++at;
        break;
      }
    }
  }
  scanned_ = static_cast<std::size_t>(at - base);
  cell_begin_ = cell_begin;
  num_ends_ = static_cast<std::size_t>(out - ends_.data());
}

// Reads more behind the record that has begun.
bool Delimited::fill() {
  if (has_ended_) return false;
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, size_ - begin_);
    const auto moved = static_cast<std::uint32_t>(begin_);
    std::size_t kept = 0;
    for (std::size_t i = next_end_; i < num_ends_; ++i) ends_[kept++] = ends_[i] - moved;
    searched_ends_ -= next_end_;
    next_end_ = 0;
    num_ends_ = kept;
    size_ -= begin_;
    scanned_ -= begin_;
    cell_begin_ -= begin_;
    begin_ = 0;
  }
  if (size_ > kMostRecordBytes) {
    line_ = next_line_;
    fail(is_quoted_ ? "begins a quoted cell that does not end within 16 MiB"
                    : "has more than 16 MiB");
  }
  const bool is_first = next_line_ == 1 && size_ == 0;
  buffer_.resize(std::max(buffer_.size(), size_ + kReadBytes));
  const std::size_t added = input_.read(buffer_.data() + size_, buffer_.size() - size_);
  has_ended_ = added == 0;
  size_ += added;
  if (is_first && std::string_view(buffer_.data(), size_).starts_with(kUtf8Mark)) {
    begin_ = scanned_ = cell_begin_ = kUtf8Mark.size();
  }
  scan();
  return true;
}

// Whether there is one: its ends of cells are then [next_end_, record_ends_).
bool Delimited::find_record_in_memory() {
  for (; searched_ends_ < num_ends_; ++searched_ends_) {
    if (buffer_[ends_[searched_ends_]] == '\n') {
      record_ends_ = ++searched_ends_;
      return true;
    }
  }
  return false;
}

// The same, reading on.
bool Delimited::find_record() {
  for (;;) {
    if (find_record_in_memory()) return true;
    if (fill()) continue;
    if (is_quoted_) {
      line_ = next_line_;
      fail("begins a quoted cell that has no end");
    }
    if (begin_ == size_) return false;
    // The last line has no end: it gets one.
    buffer_.resize(std::max(buffer_.size(), size_ + 1));
    buffer_[size_] = '\n';
    ends_.resize(std::max(ends_.size(), num_ends_ + 1));
    ends_[num_ends_++] = static_cast<std::uint32_t>(size_++);
    scanned_ = cell_begin_ = size_;
  }
}

// In place.
std::string_view Delimited::unquoted(char* begin, char* end) {
  next_line_ += std::count(begin, end, '\n');
  char* to = ++begin;
  char* at = begin;
  for (; at < end; ++at) {
    if (*at == '"') {
      ++at;
      if (at >= end || *at != '"') break;
    }
    *to++ = *at;
  }
  if (at < end)
    fail("has text after a quoted cell: '" + std::string(at, std::min(end, at + 20)) + "'");
  return {begin, static_cast<std::size_t>(to - begin)};
}

void Delimited::take_cells(std::vector<std::string_view>& cells) {
  line_ = next_line_;
  char* data = buffer_.data();
  char* at = data + begin_;
  const std::size_t last = record_ends_ - 1;
  for (std::size_t i = next_end_; i <= last; ++i) {
    char* end = data + ends_[i];
    char* cell_end = end;
    if (i == last && cell_end > at && cell_end[-1] == '\r') --cell_end;
    if (at < cell_end && *at == '"') {
      cells.push_back(unquoted(at, cell_end));
    } else {
      cells.emplace_back(at, static_cast<std::size_t>(cell_end - at));
    }
    at = end + 1;
  }
  begin_ = static_cast<std::size_t>(at - data);
  next_end_ = record_ends_;
  ++next_line_;
}

bool Delimited::next(std::vector<std::string_view>& cells) {
  cells.clear();
  if (!find_record()) return false;
  take_cells(cells);
  return true;
}

std::size_t Delimited::next_alike(std::size_t width, std::size_t most,
                                  std::vector<std::string_view>& cells,
                                  std::vector<std::int64_t>& lines) {
  cells.clear();
  lines.clear();
  // Only the first may move what is in memory.
  bool is_there = find_record();
  while (is_there && record_ends_ - next_end_ == width) {
    take_cells(cells);
    lines.push_back(line_);
    if (lines.size() == most) return most;
    is_there = find_record_in_memory();
  }
  if (is_there) searched_ends_ = next_end_;
  return lines.size();
}

bool Lines::next(std::string_view& line) {
  std::size_t searched = begin_;
  for (;;) {
    const auto* found = static_cast<const char*>(
        size_ > searched ? std::memchr(buffer_.data() + searched, '\n', size_ - searched)
                         : nullptr);
    if (found == nullptr && !has_ended_) {
      if (begin_ > 0) {
        std::memmove(buffer_.data(), buffer_.data() + begin_, size_ - begin_);
        size_ -= begin_;
        begin_ = 0;
      }
      if (size_ > kMostRecordBytes) {
        throw DataError(input_.name() + ": line " + std::to_string(line_ + 1) +
                        " has more than 16 MiB.");
      }
      searched = size_;
      buffer_.resize(std::max(buffer_.size(), size_ + kReadBytes));
      const std::size_t added = input_.read(buffer_.data() + size_, buffer_.size() - size_);
      has_ended_ = added == 0;
      size_ += added;
      continue;
    }
    if (found == nullptr && begin_ == size_) return false;
    const std::size_t end =
        found != nullptr ? static_cast<std::size_t>(found - buffer_.data()) : size_;
    line = std::string_view(buffer_.data() + begin_, end - begin_);
    if (line_ == 0 && line.starts_with(kUtf8Mark)) line.remove_prefix(kUtf8Mark.size());
    if (line.ends_with('\r')) line.remove_suffix(1);
    begin_ = std::min(end + 1, size_);
    ++line_;
    return true;
  }
}

}  // namespace tessera::workloads::data
