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

// Bits of 64 bytes in a row: which of them are what.
struct Found {
  std::uint64_t ends = 0;  // separators and ends of lines
  std::uint64_t lines = 0;
  std::uint64_t quotes = 0;
};

#ifdef __SSE2__
std::uint64_t equal_bits(__m128i bytes, char wanted) {
  return static_cast<unsigned>(_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(wanted))));
}
#endif

Found find(const char* at, char separator) {
  Found found;
#ifdef __SSE2__
  for (unsigned i = 0; i < 64; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + i));
    found.lines |= equal_bits(bytes, '\n') << i;
    found.quotes |= equal_bits(bytes, '"') << i;
    found.ends |= equal_bits(bytes, separator) << i;
  }
#else
  for (unsigned i = 0; i < 64; ++i) {
    found.lines |= std::uint64_t{at[i] == '\n'} << i;
    found.quotes |= std::uint64_t{at[i] == '"'} << i;
    found.ends |= std::uint64_t{at[i] == separator} << i;
  }
#endif
  found.ends |= found.lines;
  return found;
}

// Writes the places of the bits, eight at a time, and so up to seven more than there are.
std::uint32_t* write_places(std::uint64_t bits, std::uint32_t base, std::uint32_t* out) {
  const int count = std::popcount(bits);
  for (int done = 0; done < count; done += 8) {
    for (int i = 0; i < 8; ++i) {
      out[done + i] = base + static_cast<std::uint32_t>(std::countr_zero(bits));
      bits &= bits - 1;
    }
  }
  return out + count;
}

}  // namespace

Delimited::Delimited(Input& input, char separator) : input_(input), separator_(separator) {}

void Delimited::fail(const std::string& what) const {
  throw DataError(input_.name() + ": line " + std::to_string(line_) + " " + what + ".");
}

// Whether nothing is in the quotes, of which the last is at `quote`, but what they mean.
bool Delimited::is_plain_quoted(const char* quote, const char* end) {
  const char* next = quote + 1;
  if (next < end && *next == '\r') ++next;
  if (has_doubled_ || next >= end || (*next != '\n' && (*next != separator_ || next[-1] == '\r'))) {
    return false;
  }
  const char* begin = text() + cell_begin_;
  return std::memchr(begin, '\n', static_cast<std::size_t>(quote - begin)) == nullptr;
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
      if (!is_plain_quoted(quote, end)) odd_.push_back(static_cast<std::uint32_t>(cell_begin_));
      is_quoted_ = has_doubled_ = false;
      return quote + 1;
    }
    has_doubled_ = true;
    at = quote + 2;
  }
}

// Finds the ends of cells in what was read and not searched yet.
void Delimited::scan() {
  const char* base = text();
  const char* at = base + scanned_;
  const char* end = base + size_;
  ends_.resize(std::max(ends_.size(), num_ends_ + static_cast<std::size_t>(end - at) + 8));
  std::uint32_t* const first = ends_.data();
  std::uint32_t* out = first + num_ends_;
  while (at < end) {
    if (is_quoted_) {
      at = scan_quoted(at, end);
      if (is_quoted_) break;
      continue;
    }
    if (end - at >= 64) {
      const Found found = find(at, separator_);
      if (found.quotes == 0) {
        const auto place = static_cast<std::uint32_t>(at - base);
        for (std::uint64_t lines = found.lines; lines != 0; lines &= lines - 1) {
          const std::uint64_t before = (lines & (~lines + 1)) - 1;
          line_ends_.push_back(
              static_cast<std::uint32_t>(out - first + std::popcount(found.ends & before)));
        }
        if (found.ends != 0) {
          out = write_places(found.ends, place, out);
          cell_begin_ = static_cast<std::size_t>(out[-1]) + 1;
        }
        at += 64;
        continue;
      }
    }
    // Up to the next quote that means something, or the end of these bytes.
    const char* stop = std::min(end, at + 64);
    for (; at < stop; ++at) {
      const auto place = static_cast<std::size_t>(at - base);
      if (*at == separator_ || *at == '\n') {
        if (*at == '\n') line_ends_.push_back(static_cast<std::uint32_t>(out - first));
        *out++ = static_cast<std::uint32_t>(place);
        cell_begin_ = place + 1;
      } else if (*at == '"' && place == cell_begin_) {
        is_quoted_ = true;
        ++at;
        break;
      }
    }
  }
  scanned_ = static_cast<std::size_t>(at - base);
  num_ends_ = static_cast<std::size_t>(out - first);
}

void Delimited::make_room(std::size_t num_bytes) {
  buffer_.resize(std::max(buffer_.size(), size_ + num_bytes + 2 * kBytesAround));
}

// Reads more behind the record that has begun.
bool Delimited::fill() {
  if (has_ended_) return false;
  if (begin_ > 0) {
    std::memmove(text(), text() + begin_, size_ - begin_);
    const auto moved = static_cast<std::uint32_t>(begin_);
    std::size_t kept = 1;
    for (std::size_t i = next_end_; i < num_ends_; ++i) ends_[kept++] = ends_[i] - moved;
    ends_[0] = UINT32_MAX;
    const auto gone = static_cast<std::uint32_t>(next_end_ - 1);
    line_ends_.erase(line_ends_.begin(),
                     line_ends_.begin() + static_cast<std::ptrdiff_t>(next_line_end_));
    for (std::uint32_t& one : line_ends_) one -= gone;
    std::erase_if(odd_, [&](std::uint32_t place) { return place < moved; });
    for (std::uint32_t& place : odd_) place -= moved;
    next_odd_ = 0;
    next_line_end_ = 0;
    next_end_ = 1;
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
  make_room(kReadBytes);
  const std::size_t added = input_.read(text() + size_, buffer_.size() - size_ - 2 * kBytesAround);
  has_ended_ = added == 0;
  size_ += added;
  if (is_first && std::string_view(text(), size_).starts_with(kUtf8Mark)) {
    begin_ = scanned_ = cell_begin_ = kUtf8Mark.size();
    ends_[0] = static_cast<std::uint32_t>(begin_ - 1);
  }
  scan();
  return true;
}

// Whether there is one, reading on if need be: it ends with the cell line_ends_[next_line_end_].
bool Delimited::find_record() {
  for (;;) {
    if (num_unread() > 0) return true;
    if (fill()) continue;
    if (is_quoted_) {
      line_ = next_line_;
      fail("begins a quoted cell that has no end");
    }
    if (begin_ == size_) return false;
    // The last line has no end: it gets one.
    make_room(1);
    text()[size_] = '\n';
    ends_.resize(std::max(ends_.size(), num_ends_ + 1));
    line_ends_.push_back(static_cast<std::uint32_t>(num_ends_));
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

bool Delimited::next(std::vector<std::string_view>& cells) {
  cells.clear();
  if (!find_record()) return false;
  line_ = next_line_;
  char* at = text() + begin_;
  const std::size_t last = line_ends_[next_line_end_++];
  for (std::size_t i = next_end_; i <= last; ++i) {
    char* end = text() + ends_[i];
    char* cell_end = end;
    if (i == last && cell_end > at && cell_end[-1] == '\r') --cell_end;
    if (at < cell_end && *at == '"') {
      cells.push_back(unquoted(at, cell_end));
    } else {
      cells.emplace_back(at, static_cast<std::size_t>(cell_end - at));
    }
    at = end + 1;
  }
  begin_ = static_cast<std::size_t>(at - text());
  next_end_ = last + 1;
  ++next_line_;
  return true;
}

CellRun Delimited::next_run(std::size_t width, std::size_t most) {
  CellRun run;
  if (!find_record()) return run;
  most = std::min(most, num_unread());
  const std::uint32_t* last = line_ends_.data() + next_line_end_;
  while (next_odd_ < odd_.size() && odd_[next_odd_] < begin_) ++next_odd_;
  const std::size_t stop = next_odd_ < odd_.size() ? odd_[next_odd_] : size_;
  while (run.num_records < most &&
         last[run.num_records] + 1 == next_end_ + (run.num_records + 1) * width &&
         ends_[last[run.num_records]] < stop) {
    ++run.num_records;
  }
  if (run.num_records == 0) return run;
  run.text = text();
  run.ends = ends_.data() + next_end_;
  run.width = width;
  run.first_line = next_line_;
  next_end_ += run.num_records * width;
  next_line_end_ += run.num_records;
  begin_ = static_cast<std::size_t>(ends_[next_end_ - 1]) + 1;
  line_ = next_line_ + static_cast<std::int64_t>(run.num_records) - 1;
  next_line_ += static_cast<std::int64_t>(run.num_records);
  return run;
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
