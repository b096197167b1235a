// Who comes and who goes: of the ids of a batch that have no row, some are admitted, and rows of
// others are given up for them. Nothing changes here but what the batch's plan holds; see
// IdTable::plan_admit.

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <tuple>

#include "collision/id_table_state.h"

namespace tessera::collision {

using kernels::hash_id;
using kernels::RowRecord;

/// Decides about the misses and puts the new ids into the lines.
void IdTable::State::place(std::int64_t step, IdChanges& changes) {
  const bool has_all = options.first_bucket == 0 && options.end_bucket == kNumBuckets;
  for (const Misses::Entry& miss : misses.entries()) {
    if (!has_all) check_bucket(miss.id);
  }
  decide(step);
  make_room(step);
  plan_rows(step);
  changes.new_ids.reserve(misses.entries().size());
  changes.new_rows.reserve(misses.entries().size());
  for (const Misses::Entry& miss : misses.entries()) {
    if (miss.row < 0) continue;
    changes.new_ids.push_back(miss.id);
    changes.new_rows.push_back(miss.row);
  }
  for (const std::uint32_t row : victims) {
    changes.evicted_ids.push_back(record(row)->id);
    changes.evicted_rows.push_back(row);
  }
  changes.num_refused = num_refused;
  plan.new_ids.reserve(changes.new_ids.size());
  constexpr std::size_t kAhead = 16;
  for (std::size_t i = 0; i < changes.new_ids.size(); ++i) {
    if (i + kAhead < changes.new_ids.size()) lines.prefetch(changes.new_ids[i + kAhead]);
    insert(changes.new_ids[i], changes.new_rows[i]);
    plan.new_ids.push_back(changes.new_ids[i]);
  }
}

void IdTable::State::check_bucket(std::int64_t id) const {
  const int bucket = bucket_of(id);
  check(options.first_bucket <= bucket && bucket < options.end_bucket, options.name,
        "id " + std::to_string(id) + " is of bucket " + std::to_string(bucket) +
            "; this part has buckets " + std::to_string(options.first_bucket) + " to " +
            std::to_string(options.end_bucket - 1) + ". Send ids to their owner.");
}

/// Leaves a count of 0 to the misses that are not admitted.
void IdTable::State::decide(std::int64_t step) {
  const Admission& admission = options.admission;
  if (admission.kind == AdmissionKind::kAlways) return;
  for (Misses::Entry& miss : misses.entries()) {
    const std::uint64_t hash = hash_id(miss.id);
    bool is_admitted = false;
    if (admission.kind == AdmissionKind::kFrequency) {
      is_admitted = sketch.add(hash, miss.count) >= admission.sightings;
    } else {
      const auto salted = static_cast<std::int64_t>(
          hash ^ hash_id(static_cast<std::int64_t>(admission.seed) ^ step));
      const double draw = static_cast<double>(hash_id(salted) >> 11) * 0x1p-53;
      is_admitted =
          draw < -std::expm1(static_cast<double>(miss.count) * std::log1p(-admission.probability));
    }
    if (!is_admitted) miss.count = 0;
  }
}

bool IdTable::State::may_go(const RowRecord& record, std::int64_t step) const {
  if (record.count == 0 || record.last_step == step) return false;
  if (options.eviction.kind == EvictionKind::kTimeToLive &&
      step - record.last_step <= options.eviction.time_to_live) {
    return false;
  }
  return protect.empty() || !protect.contains(record.id);
}

/// Every row that was not seen for too long is a victim.
void IdTable::State::expire(std::int64_t step) {
  if (!expires_in(step)) return;
  deadlines.plan_due(step, [&](std::uint32_t row) {
    const RowRecord& known = *record(row);
    if (known.count == 0 || protect.contains(known.id)) return RowDeadlines::kNone;
    if (!may_go(known, step)) return deadline_of(known.last_step);
    victims.push_back(row);
    return RowDeadlines::kNone;
  });
  std::sort(victims.begin(), victims.end());
}

/// Adds to the victims so many rows of the bucket that `incoming` more fit, or as many as may go.
void IdTable::State::evict_from(int bucket, std::int64_t incoming, std::int64_t step) {
  const Eviction& eviction = options.eviction;
  const std::int64_t capacity = bucket_capacity();
  const std::int64_t over = bucket_sizes[index(bucket)] + incoming - capacity;
  struct Candidate {
    double score;
    std::uint32_t last_step;
    std::int64_t id;
    std::uint32_t row;
    bool operator<(const Candidate& other) const {
      return std::tie(score, last_step, id) < std::tie(other.score, other.last_step, other.id);
    }
  };
  std::vector<Candidate> candidates;
  for (const std::uint32_t row : bucket_rows[index(bucket)]) {
    const RowRecord& known = *record(row);
    if (!may_go(known, step)) continue;
    double score = 0;  // by last step alone
    if (eviction.kind == EvictionKind::kLfu) score = known.count;
    if (eviction.kind == EvictionKind::kDistanceLfu) {
      const auto distance = static_cast<double>(step - known.last_step + 1);
      score =
          known.count /
          (eviction.decay_exponent == 1.0 ? distance : std::pow(distance, eviction.decay_exponent));
    }
    candidates.push_back({score, known.last_step, known.id, row});
  }
  const auto share =
      static_cast<std::int64_t>(std::ceil(static_cast<double>(capacity) * eviction.share));
  const std::size_t wanted = std::min(index(std::max(over, share)), candidates.size());
  std::nth_element(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(wanted),
                   candidates.end());
  for (std::size_t i = 0; i < wanted; ++i) victims.push_back(candidates[i].row);
}

/// Chooses victims for full buckets, and refuses what finds no room all the same.
void IdTable::State::make_room(std::int64_t step) {
  expire(step);
  num_refused = 0;
  if (options.capacity == 0) return;
  std::vector<std::int64_t> incoming(kNumBuckets);
  std::vector<std::int64_t> leaving(kNumBuckets);
  for (const Misses::Entry& miss : misses.entries()) {
    if (miss.count > 0) ++incoming[index(bucket_of(miss.id))];
  }
  for (const std::uint32_t row : victims) ++leaving[index(bucket_of(record(row)->id))];
  const std::int64_t capacity = bucket_capacity();
  const std::size_t num_expired = victims.size();
  for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
    const std::int64_t left = bucket_sizes[index(bucket)] - leaving[index(bucket)];
    const bool is_full = incoming[index(bucket)] > 0 && left + incoming[index(bucket)] > capacity;
    // A bucket that just lost what was too old has nothing more to give.
    if (is_full && keeps_lists() && leaving[index(bucket)] == 0) {
      evict_from(bucket, incoming[index(bucket)], step);
    }
  }
  for (std::size_t i = num_expired; i < victims.size(); ++i) {
    ++leaving[index(bucket_of(record(victims[i])->id))];
  }
  std::vector<std::int64_t> room(kNumBuckets);
  for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
    room[index(bucket)] = capacity - bucket_sizes[index(bucket)] + leaving[index(bucket)];
  }
  for (Misses::Entry& miss : misses.entries()) {
    if (miss.count == 0) continue;
    const int bucket = bucket_of(miss.id);
    if (room[index(bucket)]-- > 0) continue;
    if (!options.refuse_when_full) {
      throw IdTableFull(
          text("no room for id " + std::to_string(miss.id) + ": bucket " + std::to_string(bucket) +
               " has all its " + std::to_string(capacity) + " rows of a capacity of " +
               std::to_string(options.capacity) +
               (keeps_lists() ? ", and none may go in this step" : ", and nothing is evicted") +
               ". Raise the capacity, choose an eviction, or let ids be refused."),
          options.name, options.capacity, bucket);
    }
    miss.count = 0;
    ++num_refused;
  }
}

/// Gives rows to the admitted ids: free ones and those of victims, then new ones.
void IdTable::State::plan_rows(std::int64_t step) {
  constexpr auto kLowestFirst = std::greater<std::uint32_t>();
  free_after = free_rows;
  free_after.insert(free_after.end(), victims.begin(), victims.end());
  if (!victims.empty()) std::make_heap(free_after.begin(), free_after.end(), kLowestFirst);
  rows_after = num_rows;
  std::vector<std::size_t> more(bucket_rows.size());
  for (Misses::Entry& miss : misses.entries()) {
    if (miss.count == 0) continue;
    if (free_after.empty()) {
      miss.row = rows_after++;
    } else {
      std::pop_heap(free_after.begin(), free_after.end(), kLowestFirst);
      miss.row = free_after.back();
      free_after.pop_back();
    }
    if (!more.empty()) ++more[index(bucket_of(miss.id))];
    if (has_deadlines()) deadlines.plan(static_cast<std::uint32_t>(miss.row), deadline_of(step));
  }
  deadlines.reserve();
  for (std::size_t bucket = 0; bucket < more.size(); ++bucket) {
    std::vector<std::uint32_t>& list = bucket_rows[bucket];
    const std::size_t needed = list.size() + more[bucket];
    if (needed > list.capacity()) list.reserve(std::max(needed, list.size() + list.size() / 2));
  }
  if (rows_after > num_rows) reserve_rows(rows_after);
}

}  // namespace tessera::collision
