// Ids as the lists of a checkpoint: saved in order of their buckets, checked when they are loaded.

#include <algorithm>
#include <numeric>
#include <string>

#include "collision/id_table_state.h"

namespace tessera::collision {

using kernels::RowRecord;

void IdTable::load(std::span<const std::int64_t> ids, std::span<const std::int64_t> counts,
                   std::span<const std::int64_t> last_steps) {
  State& state = *state_;
  check(state.num_rows == 0, state.options.name, "ids can only be loaded into an empty table.");
  check(counts.size() == ids.size() && last_steps.size() == ids.size(), state.options.name,
        std::to_string(ids.size()) + " ids, but " + std::to_string(counts.size()) + " counts and " +
            std::to_string(last_steps.size()) + " last steps.");
  const auto refuse = [&](const std::string& problem) {
    throw IdListError(state.text(problem + " The list is damaged, or not of this table."));
  };
  try {
    const auto count = static_cast<std::int64_t>(ids.size());
    state.reserve_rows(count);
    for (std::int64_t row = 0; row < count; ++row) {
      const std::int64_t id = ids[index(row)];
      const int bucket = bucket_of(id);
      if (bucket < state.options.first_bucket || bucket >= state.options.end_bucket) {
        refuse("id " + std::to_string(id) + " in row " + std::to_string(row) + " is of bucket " +
               std::to_string(bucket) + ", not of " + std::to_string(state.options.first_bucket) +
               " to " + std::to_string(state.options.end_bucket - 1) + ".");
      }
      const std::int64_t other = state.lines.find(id);
      if (other >= 0) {
        refuse("rows " + std::to_string(other) + " and " + std::to_string(row) + " both have id " +
               std::to_string(id) + ".");
      }
      if (counts[index(row)] < 1 || counts[index(row)] > kMostStep || last_steps[index(row)] < 0 ||
          last_steps[index(row)] > kMostStep) {
        refuse("row " + std::to_string(row) + " has count " + std::to_string(counts[index(row)]) +
               " and last step " + std::to_string(last_steps[index(row)]) + ".");
      }
      state.insert(id, row);
      *state.record(row) = {id, static_cast<std::uint32_t>(counts[index(row)]),
                            static_cast<std::uint32_t>(last_steps[index(row)])};
      ++state.bucket_sizes[index(bucket)];
      if (!state.bucket_rows.empty()) {
        state.bucket_rows[index(bucket)].push_back(static_cast<std::uint32_t>(row));
      }
      if (state.has_deadlines()) {
        state.deadlines.plan(static_cast<std::uint32_t>(row),
                             state.deadline_of(last_steps[index(row)]));
      }
      ++state.num_rows;
      ++state.size;
      state.last_step = std::max(state.last_step, last_steps[index(row)]);
    }
    state.deadlines.keep();
  } catch (...) {
    clear();
    throw;
  }
}

IdList IdTable::export_ids(std::int64_t since) const {
  const State& state = *state_;
  const auto is_left_out = [&](const RowRecord& record) {
    return record.count == 0 || record.last_step < since;
  };
  std::vector<std::int64_t> sizes = state.bucket_sizes;
  if (since > 0) {
    std::fill(sizes.begin(), sizes.end(), 0);
    for (std::int64_t row = 0; row < state.num_rows; ++row) {
      const RowRecord& record = *state.record(row);
      if (!is_left_out(record)) ++sizes[index(bucket_of(record.id))];
    }
  }
  // A counting sort by bucket; rows rise within one.
  std::vector<std::int64_t> next(kNumBuckets + 1);
  std::partial_sum(sizes.begin(), sizes.end(), next.begin() + 1);
  const auto size = index(next.back());
  IdList list{std::vector<std::int64_t>(size), std::vector<std::int64_t>(size),
              std::vector<std::int64_t>(size), std::vector<std::int64_t>(size)};
  for (std::int64_t row = 0; row < state.num_rows; ++row) {
    const RowRecord& record = *state.record(row);
    if (is_left_out(record)) continue;
    const auto place = index(next[index(bucket_of(record.id))]++);
    list.ids[place] = record.id;
    list.rows[place] = row;
    list.counts[place] = record.count;
    list.last_steps[place] = record.last_step;
  }
  return list;
}

IdSketch IdTable::export_sketch() const { return state_->sketch.export_state(); }

void IdTable::load_sketch(const IdSketch& sketch) {
  const State& state = *state_;
  if (sketch.sightings.size() != sketch.buckets.size() ||
      sketch.counters.size() != sketch.buckets.size() * FrequencySketch::kCounters) {
    throw IdListError(state.text("a sketch of " + std::to_string(sketch.buckets.size()) +
                                 " buckets has " + std::to_string(sketch.counters.size()) +
                                 " counters and " + std::to_string(sketch.sightings.size()) +
                                 " sums of sightings."));
  }
  for (const std::int64_t bucket : sketch.buckets) {
    if (bucket < state.options.first_bucket || bucket >= state.options.end_bucket) {
      throw IdListError(state.text("the sketch has bucket " + std::to_string(bucket) +
                                   ", which this part has not."));
    }
  }
  for (std::size_t i = 0; i < sketch.sightings.size(); ++i) {
    if (sketch.sightings[i] < 0 || sketch.sightings[i] >= FrequencySketch::kHalvedEvery) {
      throw IdListError(state.text("the sketch has " + std::to_string(sketch.sightings[i]) +
                                   " sightings in bucket " + std::to_string(sketch.buckets[i]) +
                                   "; it halves its counts before there are 16384."));
    }
  }
  state_->sketch.load(sketch);
}

}  // namespace tessera::collision
