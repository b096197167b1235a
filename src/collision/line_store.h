// src/collision/line_store.h — segments of lines, and the directory that finds them.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "collision/reserved_memory.h"
#include "kernels/id_lines.h"

namespace tessera::collision {

/// Why an id could not be placed.
enum class Placed : std::uint8_t { kYes, kNoMemory, kTooManyAlike };

/// Ids and rows in lines; see kernels/id_lines.h for what is where.
///
/// A segment that has enough ids, or no room for one, splits in two by the next bit of the hashes;
/// no other segment is touched, and every id keeps its line and slot in the half it goes to, so a
/// split never fails half-way.
///
/// One thread may change it while others `read`. Each segment has a version, odd while it changes:
/// who reads begins again if the version was odd or is another one afterwards. A split leaves the
/// version odd until the directory names both halves, so whoever sees an even one, and then the
/// directory as it was, has the right segment. Directories that became too small stay until the
/// end: together they are as large as the last.
class LineStore {
 public:
  /// `most_bytes`: of lines; 0: no limit.
  explicit LineStore(std::int64_t most_bytes);

  kernels::IdLines view() const noexcept;
  std::int64_t find(std::int64_t id) const noexcept;
  /// rows[i]: the row of ids[i], or -1. May run beside one thread that inserts or erases.
  void read(std::span<const std::int64_t> ids, std::span<std::int64_t> rows) const noexcept;
  /// Adds an id that is not there. Unless kYes, nothing changed but the number of segments.
  Placed insert(std::int64_t id, std::uint32_t row);
  /// Asks for the line of an id that will be inserted soon.
  void prefetch(std::int64_t id) const noexcept;
  /// Removes an id that is there.
  void erase(std::int64_t id) noexcept;
  void clear();

  std::int64_t num_segments() const noexcept {
    return static_cast<std::int64_t>(local_depth_.size());
  }
  std::int64_t bytes() const noexcept;
  std::int64_t huge_page_bytes() const { return memory_.huge_page_bytes(); }

 private:
  struct Directory {
    explicit Directory(int bits)
        : shift(64 - bits), entries(std::make_unique<std::uint32_t[]>(std::size_t{1} << bits)) {}
    int shift;
    std::unique_ptr<std::uint32_t[]> entries;
  };
  class Change;

  const Directory& directory() const noexcept { return *directories_.back(); }
  std::uint32_t* version(std::uint32_t number) const noexcept {
    return static_cast<std::uint32_t*>(versions_.data()) + number;
  }
  std::uint32_t segment_of(std::uint64_t hash) const noexcept {
    return directory().entries[hash >> directory().shift];
  }
  void publish(std::unique_ptr<Directory> next);
  std::int64_t read(std::uint64_t hash, std::int64_t id) const noexcept;
  kernels::IdLine* segment(std::uint32_t number) const noexcept;
  bool add_segment(int depth);
  Placed split(std::uint64_t hash);

  ReservedMemory memory_;
  ReservedMemory versions_;
  std::int64_t most_bytes_;
  std::vector<std::unique_ptr<Directory>> directories_;  // the last is in use
  std::atomic<const Directory*> current_ = nullptr;      // the same one, for readers
  int depth_ = 1;                                        // bits that index the directory
  std::vector<std::uint8_t> local_depth_;
  std::vector<std::uint16_t> sizes_;   // ids of each segment
  std::vector<std::uint16_t> limits_;  // how many it may have before it splits
};

}  // namespace tessera::collision
