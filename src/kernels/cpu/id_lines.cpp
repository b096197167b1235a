// Finds ids in lines of five. Compiled once per instruction set; see kernels/CMakeLists.txt. The
// lines of ids some way ahead are asked for, so that they have come when their ids are compared.
// One id in twelve lies behind its line: it waits for the next line a while, and others go on.

#include "kernels/id_lines.h"

#include <cstddef>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tessera::kernels {
namespace {

// Ids hashed at a time.
constexpr int kStep = 8;
// Lines on their way: more than a core's line fill buffers.
constexpr std::int64_t kAhead = 48;
constexpr std::int64_t kRing = 64;
// Ids between asking for the line behind an id's own and looking there.
constexpr std::int64_t kBehindAfter = 24;
constexpr std::uint64_t kMostBehind = 32;
static_assert(kBehindAfter + kStep <= static_cast<std::int64_t>(kMostBehind));
// Ids between finding a row in its own line and touching its record: half as many for those that
// waited.
constexpr std::int64_t kTouchAfter = 48;
static_assert(kAhead % kStep == 0 && kTouchAfter % kStep == 0 && kAhead + kStep <= kRing);
static_assert(kBehindAfter <= kTouchAfter);

const IdLine* line_of(IdLines lines, std::uint64_t hash) {
  return lines.lines +
         static_cast<std::size_t>(lines.directory[hash >> lines.shift]) *
             static_cast<std::size_t>(kLinesPerSegment) +
         hash % kLinesPerSegment;
}

/// Where kStep ids belong.
inline void place_ids(IdLines lines, const std::int64_t* ids, const IdLine** places) {
  std::uint64_t hashes[kStep];
  for (int i = 0; i < kStep; ++i) hashes[i] = hash_id(ids[i]);  // in vectors
  for (int i = 0; i < kStep; ++i) places[i] = line_of(lines, hashes[i]);
}

/// A bit for every occupied slot that holds the id.
inline unsigned slots_with(const IdLine& line, std::int64_t id) {
#if defined(__AVX512F__)
  const __m512i whole = _mm512_load_si512(&line);
  return _mm512_cmpeq_epi64_mask(whole, _mm512_set1_epi64(id)) & line.occupied;
#elif defined(__AVX2__)
  const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(&line));
  const __m256i equal = _mm256_cmpeq_epi64(low, _mm256_set1_epi64x(id));
  auto bits = static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(equal)));
  bits |= static_cast<unsigned>(line.keys[4] == id) << 4;
  return bits & line.occupied;
#else
  unsigned bits = 0;
  for (int slot = 0; slot < kSlotsPerLine; ++slot) {
    bits |= static_cast<unsigned>(line.keys[slot] == id) << slot;
  }
  return bits & line.occupied;
#endif
}

[[gnu::noinline]] std::int64_t find_behind(IdLines lines, std::int64_t id) {
  const std::uint64_t hash = hash_id(id);
  const IdLine* segment = line_of(lines, hash) - hash % kLinesPerSegment;
  for (unsigned step = 1; step < kMostLines; ++step) {
    const IdLine& line = segment[(hash + step) % kLinesPerSegment];
    const unsigned slots = slots_with(line, id);
    if (slots != 0) return line.rows[__builtin_ctz(slots)];
    if (line.overflow == 0) return -1;
  }
  return -1;
}

/// The next line of the segment.
inline const IdLine* line_behind(IdLines lines, const IdLine* line) {
  const std::int64_t number = line - lines.lines;
  return lines.lines + ((number & -kLinesPerSegment) | ((number + 1) % kLinesPerSegment));
}

/// Calls `found(i, row)` for every id, those behind their lines later than others, and `after(at)`
/// for every kStep-th: those before `at - kBehindAfter` are found then. All in one function: what
/// is captured stays in registers, and GCC drops calls of functions that only prefetch.
template <typename Found, typename After>
[[gnu::always_inline]] inline void for_rows(IdLines lines, const std::int64_t* ids,
                                            std::int64_t count, const Found& found,
                                            const After& after) {
  alignas(64) const IdLine* ring[kRing];
  std::int64_t behind[kMostBehind];
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  const std::int64_t whole = count / kStep * kStep;
  const auto ask = [&](std::int64_t at) {
    const IdLine** places = ring + at % kRing;
    place_ids(lines, ids + at, places);
    for (int i = 0; i < kStep; ++i) __builtin_prefetch(places[i]);
  };
  const auto look_behind = [&](std::int64_t end) __attribute__((always_inline)) {
    for (; first != last && behind[first % kMostBehind] < end; ++first) {
      const std::int64_t at = behind[first % kMostBehind];
      found(at, find_behind(lines, ids[at]));
    }
  };
  const auto look = [&](const IdLine& line, std::int64_t at) __attribute__((always_inline)) {
    const unsigned slots = slots_with(line, ids[at]);
    if (slots != 0) [[likely]] {
      found(at, line.rows[__builtin_ctz(slots)]);
      return;
    }
    if (line.overflow == 0) {
      found(at, -1);
      return;
    }
    __builtin_prefetch(line_behind(lines, &line));
    behind[last++ % kMostBehind] = at;
  };
  for (std::int64_t at = 0; at < kAhead && at < whole; at += kStep) ask(at);
  for (std::int64_t at = 0; at < whole; at += kStep) {
    if (at + kAhead < whole) ask(at + kAhead);
    const IdLine* const* places = ring + at % kRing;
    for (int i = 0; i < kStep; ++i) look(*places[i], at + i);
    look_behind(at + kStep - kBehindAfter);
    after(at);
  }
  look_behind(whole);
  for (std::int64_t at = whole; at < count; ++at) {
    look(*line_of(lines, hash_id(ids[at])), at);
    look_behind(count);
  }
}

void find_rows(IdLines lines, const std::int64_t* ids, std::int64_t count, std::int64_t* rows) {
  for_rows(
      lines, ids, count, [&](std::int64_t i, std::int64_t row) { rows[i] = row; },
      [](std::int64_t) {});
}

void touch_some(RowRecord* records, const std::int64_t* rows, const std::int64_t* counts,
                std::int64_t begin, std::int64_t end, std::uint32_t step, TouchedRecord* before) {
  for (std::int64_t i = begin; i < end; ++i) {
    before[i] = {};
    if (rows[i] < 0) continue;
    RowRecord& record = records[rows[i]];
    before[i] = {record.count, record.last_step};
    const std::uint64_t sum =
        record.count + (counts == nullptr ? 1 : static_cast<std::uint64_t>(counts[i]));
    record.count = sum > 0xffffffffU ? 0xffffffffU : static_cast<std::uint32_t>(sum);
    record.last_step = step;
  }
}

void touch_rows(IdLines lines, RowRecord* records, const std::int64_t* ids,
                const std::int64_t* counts, std::int64_t count, std::uint32_t step,
                std::int64_t* rows, TouchedRecord* before) {
  // A record is asked for when its row is known, and touched some ids later.
  std::int64_t done = 0;
  for_rows(
      lines, ids, count,
      [&](std::int64_t i, std::int64_t row) {
        rows[i] = row;
        if (row >= 0) __builtin_prefetch(records + row, 1);
      },
      [&](std::int64_t at) {
        if (at < kTouchAfter) return;
        touch_some(records, rows, counts, done, done + kStep, step, before);
        done += kStep;
      });
  touch_some(records, rows, counts, done, count, step, before);
}

}  // namespace

extern const IdLineKernels TESSERA_KERNEL_TABLE(kIdLines);
const IdLineKernels TESSERA_KERNEL_TABLE(kIdLines){find_rows, touch_rows};

}  // namespace tessera::kernels
