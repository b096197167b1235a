// src/collision/id_table_state.h — what an id table keeps, and the parts of an admission.
//
// id_table.cpp is what users call, id_admission.cpp decides who comes and who goes, id_lists.cpp
// saves and loads.

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "collision/frequency_sketch.h"
#include "collision/line_store.h"
#include "collision/reserved_memory.h"
#include "collision/row_deadlines.h"
#include "kernels/id_lines.h"
#include "tessera/collision/id_table.h"

namespace tessera::collision {

inline constexpr std::int64_t kMostRows = 0xffffffff;
inline constexpr std::int64_t kMostStep = 0xffffffff;

inline std::size_t index(std::int64_t number) { return static_cast<std::size_t>(number); }

/// Throws std::invalid_argument, naming the table.
inline void check(bool is_good, const std::string& name, const std::string& text) {
  if (!is_good) throw std::invalid_argument("id table '" + name + "': " + text);
}

/// The different ids of a batch that have no row, in order of first appearance.
class Misses {
 public:
  struct Entry {
    std::int64_t id;
    std::int64_t count;  // sightings in this batch
    std::int64_t row;    // planned; -1: none
  };

  void start(std::size_t most) {
    entries_.clear();
    const std::size_t size = std::bit_ceil(std::max<std::size_t>(2 * most, 16));
    if (places_.size() < size) places_.resize(size);
    mask_ = size - 1;
    std::fill_n(places_.begin(), size, 0U);
  }
  void add(std::int64_t id, std::int64_t count) {
    for (std::size_t at = kernels::hash_id(id) & mask_;; at = (at + 1) & mask_) {
      if (places_[at] == 0) {
        entries_.push_back({id, count, -1});
        places_[at] = static_cast<std::uint32_t>(entries_.size());
        return;
      }
      Entry& entry = entries_[places_[at] - 1];
      if (entry.id == id) {
        // Counts are kept up to far less; sums stay within the number.
        entry.count += std::min(count, std::numeric_limits<std::int64_t>::max() - entry.count);
        return;
      }
    }
  }
  std::int64_t row_of(std::int64_t id) const {
    std::size_t at = kernels::hash_id(id) & mask_;
    while (entries_[places_[at] - 1].id != id) at = (at + 1) & mask_;
    return entries_[places_[at] - 1].row;
  }
  std::vector<Entry>& entries() { return entries_; }

 private:
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> places_;  // number of the entry plus 1; 0: free
  std::size_t mask_ = 0;
};

/// A batch that was admitted, but is neither kept nor undone.
struct AdmissionPlan {
  bool is_open = false;
  bool changes_rows = false;
  std::int64_t step = 0;
  std::vector<std::int64_t> found;    // the row of every id as it was; -1: none
  std::vector<std::int64_t> new_ids;  // in the lines already
};

struct IdTable::State {
  explicit State(IdTableOptions wanted)
      : options(std::move(wanted)),
        lines(options.most_bytes),
        records(index(kMostRows) * sizeof(kernels::RowRecord)),
        protect(options.protect.begin(), options.protect.end()),
        bucket_sizes(kNumBuckets),
        bucket_rows(keeps_lists() ? kNumBuckets : 0) {}

  bool keeps_lists() const {
    return options.capacity > 0 && options.eviction.kind != EvictionKind::kNone;
  }
  bool has_deadlines() const { return options.eviction.kind == EvictionKind::kTimeToLive; }
  /// Whether rows are looked at that may be too old.
  bool expires_in(std::int64_t step) const {
    return has_deadlines() && step % options.eviction.interval == 0 && deadlines.has_due(step);
  }
  /// The first step in which a row that was last seen in this one is too old.
  std::int64_t deadline_of(std::int64_t last_step) const {
    // No step is as large; so sums do not overflow.
    constexpr std::int64_t kNever = 2 * kMostStep;
    const std::int64_t interval = std::min(options.eviction.interval, kNever);
    const std::int64_t first = last_step + std::min(options.eviction.time_to_live, kNever) + 1;
    return (first + interval - 1) / interval * interval;
  }
  std::int64_t bucket_capacity() const {
    return (options.capacity + kNumBuckets - 1) / kNumBuckets;
  }
  kernels::RowRecord* record(std::int64_t row) const {
    return static_cast<kernels::RowRecord*>(records.data()) + row;
  }

  std::string text(const std::string& problem) const {
    return "id table '" + options.name + "': " + problem;
  }
  void reserve_rows(std::int64_t rows);
  void insert(std::int64_t id, std::int64_t row);
  void check_bucket(std::int64_t id) const;

  void decide(std::int64_t step);
  void make_room(std::int64_t step);
  void evict_from(int bucket, std::int64_t incoming, std::int64_t step);
  void expire(std::int64_t step);
  bool may_go(const kernels::RowRecord& record, std::int64_t step) const;
  void plan_rows(std::int64_t step);
  void place(std::int64_t step, IdChanges& changes);
  void apply(std::int64_t step) noexcept;
  void drop_victims() noexcept;

  IdTableOptions options;
  LineStore lines;
  ReservedMemory records;
  FrequencySketch sketch;
  std::unordered_set<std::int64_t> protect;
  std::vector<std::int64_t> bucket_sizes;
  std::vector<std::vector<std::uint32_t>> bucket_rows;
  RowDeadlines deadlines;                // with a time to live
  std::vector<std::uint32_t> free_rows;  // a heap, the lowest on top
  std::int64_t num_rows = 0;
  std::int64_t size = 0;
  std::int64_t last_step = 0;

  // Of the batch at hand; kept for the next one's use of the memory.
  Misses misses;
  AdmissionPlan plan;
  std::vector<kernels::TouchedRecord> before;
  std::vector<std::uint32_t> victims;     // rows
  std::vector<std::uint32_t> free_after;  // the heap as it will be
  std::int64_t rows_after = 0;
  std::int64_t num_refused = 0;
};

}  // namespace tessera::collision
