// src/collision/frequency_sketch.h — how often ids without a row were seen, at most.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/collision/id_table.h"

namespace tessera::collision {

/// A count-min sketch per shard bucket: what it says of an id is never less than the truth since
/// the bucket's counts were last halved. What a call adds can be taken back.
class FrequencySketch {
 public:
  static constexpr int kRows = 4;
  static constexpr int kColumns = 4096;
  static constexpr int kCounters = kRows * kColumns;
  static constexpr std::int64_t kHalvedEvery = std::int64_t{1} << 14;

  FrequencySketch() : buckets_(kNumBuckets) {}

  /// Adds `count` sightings of the id with this hash and returns how often it was seen, at most
  /// 255.
  int add(std::uint64_t hash, std::int64_t count);
  /// Forgets how to take back what was added so far.
  void keep() noexcept;
  /// Takes back what was added since the last `keep`.
  void undo() noexcept;
  void clear();

  IdSketch export_state() const;
  void load(const IdSketch& state);
  std::int64_t bytes() const noexcept;

 private:
  using Counters = std::array<std::uint8_t, kCounters>;
  struct Bucket {
    std::unique_ptr<Counters> counters;
    std::int64_t sightings = 0;
  };
  /// What one sighting changed. `halved`: all counters, before they were halved.
  struct Undo {
    int bucket;
    bool is_first;  // before it, the bucket had no counters
    std::array<std::uint16_t, kRows> places;
    std::array<std::uint8_t, kRows> values;
    std::int64_t sightings;
    std::unique_ptr<Counters> halved;
  };

  std::vector<Bucket> buckets_;
  std::vector<Undo> log_;
};

}  // namespace tessera::collision
