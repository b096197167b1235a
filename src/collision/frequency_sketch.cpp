#include "collision/frequency_sketch.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/id_lines.h"

namespace tessera::collision {
namespace {

// Any odd number does: places in the sketch must not follow from the bits that chose the bucket.
constexpr std::uint64_t kOther = 0x9e3779b97f4a7c15U;

}  // namespace

int FrequencySketch::add(std::uint64_t hash, std::int64_t count) {
  const int number = kernels::bucket_of_hash(hash);
  Bucket& bucket = buckets_[static_cast<std::size_t>(number)];
  // All memory before the first change.
  log_.reserve(log_.size() + 1 > log_.capacity() ? 2 * log_.size() + 16 : log_.capacity());
  Undo undo{.bucket = number, .is_first = !bucket.counters, .sightings = bucket.sightings};
  auto fresh = undo.is_first ? std::make_unique<Counters>() : nullptr;
  const std::uint64_t bits = kernels::hash_id(static_cast<std::int64_t>(hash + kOther));
  // Unsigned: a bucket's sightings and the largest count are more than a signed number holds.
  const std::uint64_t sightings =
      static_cast<std::uint64_t>(bucket.sightings) + static_cast<std::uint64_t>(count);
  constexpr auto kEvery = static_cast<std::uint64_t>(kHalvedEvery);
  if (sightings >= kEvery) {
    undo.halved = std::make_unique<Counters>(undo.is_first ? *fresh : *bucket.counters);
  }
  if (undo.is_first) bucket.counters = std::move(fresh);
  Counters& counters = *bucket.counters;
  int least = 255;
  for (std::size_t row = 0; row < kRows; ++row) {
    const auto place = static_cast<std::uint16_t>(row * kColumns + (bits >> (12 * row) & 4095U));
    undo.places[row] = place;
    undo.values[row] = counters[place];
    const auto sum = static_cast<std::uint8_t>(
        std::min<std::int64_t>(255, counters[place] + std::min<std::int64_t>(255, count)));
    counters[place] = sum;
    least = std::min<int>(least, sum);
  }
  bucket.sightings = static_cast<std::int64_t>(sightings % kEvery);
  // Eight halvings leave nothing of a counter, so that a large count takes no longer.
  const std::uint64_t halvings = std::min<std::uint64_t>(8, sightings / kEvery);
  if (halvings > 0) {
    for (std::uint8_t& counter : counters) counter = static_cast<std::uint8_t>(counter >> halvings);
  }
  log_.push_back(std::move(undo));
  return least;
}

void FrequencySketch::keep() noexcept { log_.clear(); }

void FrequencySketch::undo() noexcept {
  for (; !log_.empty(); log_.pop_back()) {
    Undo& last = log_.back();
    Bucket& bucket = buckets_[static_cast<std::size_t>(last.bucket)];
    if (last.is_first) {
      bucket.counters = nullptr;
    } else if (last.halved) {
      *bucket.counters = *last.halved;
    } else {
      for (std::size_t row = 0; row < kRows; ++row) {
        (*bucket.counters)[last.places[row]] = last.values[row];
      }
    }
    bucket.sightings = last.sightings;
  }
}

void FrequencySketch::clear() {
  log_.clear();
  for (Bucket& bucket : buckets_) bucket = {};
}

IdSketch FrequencySketch::export_state() const {
  IdSketch state;
  for (int number = 0; number < kNumBuckets; ++number) {
    const Bucket& bucket = buckets_[static_cast<std::size_t>(number)];
    if (!bucket.counters) continue;
    state.buckets.push_back(number);
    state.sightings.push_back(bucket.sightings);
    state.counters.insert(state.counters.end(), bucket.counters->begin(), bucket.counters->end());
  }
  return state;
}

void FrequencySketch::load(const IdSketch& state) {
  clear();
  for (std::size_t i = 0; i < state.buckets.size(); ++i) {
    Bucket& bucket = buckets_[static_cast<std::size_t>(state.buckets[i])];
    bucket.counters = std::make_unique<Counters>();
    std::copy_n(state.counters.begin() + static_cast<std::ptrdiff_t>(i * kCounters), kCounters,
                bucket.counters->begin());
    bucket.sightings = state.sightings[i];
  }
}

std::int64_t FrequencySketch::bytes() const noexcept {
  return static_cast<std::int64_t>(sizeof(Counters)) *
         std::count_if(buckets_.begin(), buckets_.end(),
                       [](const Bucket& bucket) { return bucket.counters != nullptr; });
}

}  // namespace tessera::collision
