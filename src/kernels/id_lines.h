// src/kernels/id_lines.h — finds 64-bit ids in lines of five.
//
// Meaning, for every id:
//
//   h = hash_id(id)
//   segment = directory[h >> shift], line = h & 1023
//   for up to kMostLines lines from there on, round the segment:
//     a slot of the line that is occupied and holds the id: its row, done
//     no id that belongs here or before lies behind this line (overflow 0): -1, done
//   -1
//
// touch_rows is find_rows, and for every id found: its record's count grows by the id's count, up
// to 2^32 - 1, and its last step becomes `step`. What the record held before is kept in `before`,
// in order, so that the calls can be undone from the last to the first.

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"

namespace tessera::kernels {

inline constexpr int kSlotsPerLine = 5;
inline constexpr int kLineBits = 10;
inline constexpr std::int64_t kLinesPerSegment = std::int64_t{1} << kLineBits;
/// The line an id belongs to and the eight behind it.
inline constexpr int kMostLines = 9;

/// One cache line. Occupied bits, not a value of the key, say which slots are in use.
struct alignas(64) IdLine {
  std::int64_t keys[kSlotsPerLine];
  std::uint32_t rows[kSlotsPerLine];
  std::uint8_t occupied;
  /// How many ids were pushed past this line to a later one.
  std::uint8_t overflow;
  std::uint16_t unused;
};
static_assert(sizeof(IdLine) == 64);

/// What is kept of a row beside its weights. A count of 0 marks a row nobody has.
struct RowRecord {
  std::int64_t id;
  std::uint32_t count;
  std::uint32_t last_step;
};
static_assert(sizeof(RowRecord) == 16);

/// The part of a record that touch_rows changes.
struct TouchedRecord {
  std::uint32_t count;
  std::uint32_t last_step;
};

/// A bijection of 64 bits: bits 0-9 choose the line, 10-19 the shard bucket, the others the
/// segment.
inline std::uint64_t hash_id(std::int64_t id) noexcept {
  constexpr std::uint64_t kFactor = 0xd6e8feb86659fd93U;
  auto x = static_cast<std::uint64_t>(id);
  x ^= x >> 32;
  x *= kFactor;
  x ^= x >> 32;
  x *= kFactor;
  x ^= x >> 32;
  return x;
}

/// The shard bucket of a hash, 0 to 1023.
inline int bucket_of_hash(std::uint64_t hash) noexcept {
  return static_cast<int>(hash >> kLineBits & 1023U);
}

/// Segments of 1024 lines, and which one the top bits of a hash belong to.
struct IdLines {
  const IdLine* lines;
  const std::uint32_t* directory;
  int shift;  // 64 less the bits that index the directory, at most 63
};

struct IdLineKernels {
  void (*find_rows)(IdLines lines, const std::int64_t* ids, std::int64_t count, std::int64_t* rows);
  /// `counts` may be null, for ones.
  void (*touch_rows)(IdLines lines, RowRecord* records, const std::int64_t* ids,
                     const std::int64_t* counts, std::int64_t count, std::uint32_t step,
                     std::int64_t* rows, TouchedRecord* before);
};

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
const IdLineKernels* id_line_kernels(Isa isa) noexcept;
/// The versions for the instruction set of this process.
const IdLineKernels& id_line_kernels() noexcept;
/// The plain loops that judge the others.
const IdLineKernels& id_line_reference() noexcept;

}  // namespace tessera::kernels
