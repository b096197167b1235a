#include "tessera/collision/id_table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "collision/id_table_state.h"

namespace tessera::collision {
namespace {

using kernels::bucket_of_hash;
using kernels::hash_id;
using kernels::RowRecord;

void check_options(const IdTableOptions& options) {
  const Admission& admission = options.admission;
  const Eviction& eviction = options.eviction;
  check(options.capacity >= 0, options.name,
        "a capacity of " + std::to_string(options.capacity) +
            " rows cannot be. Give at least 1, or 0 for no limit.");
  check(admission.kind != AdmissionKind::kFrequency ||
            (admission.sightings >= 1 && admission.sightings <= 255),
        options.name,
        "admission after " + std::to_string(admission.sightings) +
            " sightings cannot be counted. Give 1 to 255.");
  check(admission.kind != AdmissionKind::kProbability ||
            (admission.probability > 0 && admission.probability <= 1),
        options.name,
        "an admission probability of " + std::to_string(admission.probability) +
            " cannot be. Give more than 0 and at most 1.");
  check(eviction.kind != EvictionKind::kTimeToLive ||
            (eviction.time_to_live >= 1 && eviction.interval >= 1),
        options.name,
        "a time to live of " + std::to_string(eviction.time_to_live) + " steps, looked at every " +
            std::to_string(eviction.interval) + ", cannot be. Give at least 1 each.");
  check(eviction.kind == EvictionKind::kTimeToLive || eviction.interval == 1, options.name,
        "an eviction interval of " + std::to_string(eviction.interval) +
            " is for a time to live alone; others evict when a bucket is full. Leave it out.");
  check(eviction.kind == EvictionKind::kDistanceLfu || eviction.decay_exponent == 1.0, options.name,
        "a decay exponent of " + std::to_string(eviction.decay_exponent) +
            " is for distance-lfu alone; others do not weigh distances. Leave it out.");
  check(
      options.capacity > 0 || eviction.kind == EvictionKind::kNone ||
          eviction.kind == EvictionKind::kTimeToLive,
      options.name,
      "lfu, lru and distance-lfu evict when a bucket is full, and without a capacity none ever is. "
      "Give a capacity, a time to live, or no eviction.");
  check(eviction.share >= 0 && eviction.share <= 1 && std::isfinite(eviction.decay_exponent),
        options.name, "the share of rows to evict must be 0 to 1, the decay exponent finite.");
  check(0 <= options.first_bucket && options.first_bucket <= options.end_bucket &&
            options.end_bucket <= kNumBuckets,
        options.name,
        "buckets " + std::to_string(options.first_bucket) + " to " +
            std::to_string(options.end_bucket) + " are not within 0 to 1024.");
  check(options.most_bytes >= 0, options.name, "the limit of bytes is negative.");
}

}  // namespace

std::uint64_t id_hash(std::int64_t id) noexcept { return hash_id(id); }

std::int64_t id_of_hash(std::uint64_t hash) noexcept {
  // A number times this one times the hash's factor is the number itself, modulo 2^64.
  constexpr std::uint64_t kInverse = [] {
    constexpr std::uint64_t kFactor = 0xd6e8feb86659fd93U;
    std::uint64_t inverse = kFactor;
    for (int step = 0; step < 6; ++step) inverse *= 2 - kFactor * inverse;
    return inverse;
  }();
  hash ^= hash >> 32;
  hash *= kInverse;
  hash ^= hash >> 32;
  hash *= kInverse;
  hash ^= hash >> 32;
  return static_cast<std::int64_t>(hash);
}

int bucket_of(std::int64_t id) noexcept { return bucket_of_hash(hash_id(id)); }

void IdTable::State::reserve_rows(std::int64_t rows) {
  if (rows > kMostRows) {
    throw TooManyRows(
        text("more than 4294967295 rows on one rank. Split the table over more ranks."));
  }
  const auto bytes = index(rows) * sizeof(RowRecord);
  const bool is_allowed = options.most_bytes == 0 ||
                          static_cast<std::int64_t>(bytes) + lines.bytes() <= options.most_bytes;
  if (is_allowed && records.grow(bytes)) return;
  throw IdMemoryError(text("no memory for " + std::to_string(bytes) + " bytes of records; " +
                           std::to_string(size) +
                           " ids are held. Set a capacity with eviction, or use more ranks."));
}

void IdTable::State::insert(std::int64_t id, std::int64_t row) {
  switch (lines.insert(id, static_cast<std::uint32_t>(row))) {
    case Placed::kYes:
      return;
    case Placed::kNoMemory:
      throw IdMemoryError(text("no memory for 65536 more bytes of lines beside " +
                               std::to_string(lines.bytes()) + "; " + std::to_string(size) +
                               " ids are held. Set a capacity with eviction, or use more ranks."));
    case Placed::kTooManyAlike:
      throw IdTableError(text("id " + std::to_string(id) +
                              " has a hash like too many others; such ids do not come by chance. "
                              "Hash them with a secret salt first."));
  }
}

/// Takes the victims out of lines, records and lists.
void IdTable::State::drop_victims() noexcept {
  if (victims.empty()) return;
  std::array<bool, kNumBuckets> is_changed{};
  for (const std::uint32_t row : victims) {
    RowRecord& gone = *record(row);
    const int bucket = bucket_of(gone.id);
    lines.erase(gone.id);
    --bucket_sizes[index(bucket)];
    is_changed[index(bucket)] = true;
    gone = {};
  }
  size -= static_cast<std::int64_t>(victims.size());
  for (std::size_t bucket = 0; bucket < bucket_rows.size(); ++bucket) {
    if (!is_changed[bucket]) continue;
    std::erase_if(bucket_rows[bucket], [&](std::uint32_t row) { return record(row)->count == 0; });
  }
}

/// Makes the batch's plan true. The new ids are in the lines already.
void IdTable::State::apply(std::int64_t step) noexcept {
  drop_victims();
  constexpr std::int64_t kMostCount = std::numeric_limits<std::uint32_t>::max();
  for (const Misses::Entry& miss : misses.entries()) {
    if (miss.row < 0) continue;
    *record(miss.row) = {miss.id, static_cast<std::uint32_t>(std::min(kMostCount, miss.count)),
                         static_cast<std::uint32_t>(step)};
    const int bucket = bucket_of(miss.id);
    ++bucket_sizes[index(bucket)];
    if (!bucket_rows.empty()) {
      bucket_rows[index(bucket)].push_back(static_cast<std::uint32_t>(miss.row));
    }
  }
  size += static_cast<std::int64_t>(plan.new_ids.size());
  free_rows.swap(free_after);
  num_rows = rows_after;
  last_step = step;
  sketch.keep();
  deadlines.keep();
}

IdTable::IdTable(IdTableOptions options) {
  check_options(options);
  const std::string name = options.name;
  try {
    state_ = std::make_unique<State>(std::move(options));
  } catch (const std::bad_alloc&) {
    throw IdMemoryError("id table '" + name + "': no memory to begin with.");
  }
}
IdTable::IdTable(IdTable&&) noexcept = default;
IdTable& IdTable::operator=(IdTable&&) noexcept = default;
IdTable::~IdTable() = default;

void IdTable::find(std::span<const std::int64_t> ids, std::span<std::int64_t> rows,
                   const Parallel& parallel) const {
  check(
      ids.size() == rows.size(), state_->options.name,
      std::to_string(ids.size()) + " ids, but room for " + std::to_string(rows.size()) + " rows.");
  const kernels::IdLines view = state_->lines.view();
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    kernels::id_line_kernels().find_rows(view, ids.data() + begin, end - begin,
                                         rows.data() + begin);
  };
  const auto count = static_cast<std::int64_t>(ids.size());
  if (parallel) {
    parallel(count, part);
  } else {
    part(0, count);
  }
}

void IdTable::find_beside(std::span<const std::int64_t> ids, std::span<std::int64_t> rows) const {
  check(
      ids.size() == rows.size(), state_->options.name,
      std::to_string(ids.size()) + " ids, but room for " + std::to_string(rows.size()) + " rows.");
  state_->lines.read(ids, rows);
}

IdChanges IdTable::admit(std::span<const std::int64_t> ids, std::span<const std::int64_t> counts,
                         std::int64_t step, std::span<std::int64_t> rows) {
  IdChanges changes = plan_admit(ids, counts, step, rows);
  keep_admitted();
  return changes;
}

IdChanges IdTable::plan_admit(std::span<const std::int64_t> ids,
                              std::span<const std::int64_t> counts, std::int64_t step,
                              std::span<std::int64_t> rows) {
  State& state = *state_;
  const std::string& name = state.options.name;
  check(!state.plan.is_open, name, "the ids admitted last are neither kept nor undone.");
  check(ids.size() == rows.size() && (counts.empty() || counts.size() == ids.size()), name,
        std::to_string(ids.size()) + " ids, but " + std::to_string(counts.size()) +
            " counts and room for " + std::to_string(rows.size()) + " rows.");
  check(state.last_step <= step && step <= kMostStep, name,
        "step " + std::to_string(step) + " is not within " + std::to_string(state.last_step) +
            ", the last one, and 4294967295.");
  for (std::size_t i = 0; i < counts.size(); ++i) {
    check(counts[i] >= 1, name,
          "id " + std::to_string(ids[i]) + " at position " + std::to_string(i) + " was seen " +
              std::to_string(counts[i]) + " times. Leave it out, or give at least 1.");
  }
  IdChanges changes;
  AdmissionPlan& plan = state.plan;
  if (state.before.size() < ids.size()) state.before.resize(ids.size());
  plan.found.resize(ids.size());
  state.misses.start(0);
  state.victims.clear();
  plan.step = step;
  plan.new_ids.clear();
  plan.changes_rows = false;
  kernels::id_line_kernels().touch_rows(
      state.lines.view(), state.record(0), ids.data(), counts.empty() ? nullptr : counts.data(),
      static_cast<std::int64_t>(ids.size()), static_cast<std::uint32_t>(step), plan.found.data(),
      state.before.data());
  plan.is_open = true;
  try {
    const auto num_missing = std::count(plan.found.begin(), plan.found.end(), -1);
    changes.num_found = static_cast<std::int64_t>(ids.size()) - num_missing;
    if (num_missing > 0 || state.expires_in(step)) {
      plan.changes_rows = true;
      state.misses.start(index(num_missing));
      for (std::size_t i = 0; i < ids.size(); ++i) {
        if (plan.found[i] >= 0) continue;
        state.misses.add(ids[i], counts.empty() ? 1 : counts[i]);
      }
      state.place(step, changes);
    }
    std::copy(plan.found.begin(), plan.found.end(), rows.begin());
    for (std::size_t i = 0; i < ids.size() && num_missing > 0; ++i) {
      if (rows[i] < 0) rows[i] = state.misses.row_of(ids[i]);
    }
  } catch (...) {
    undo_admitted();
    throw;
  }
  return changes;
}

void IdTable::keep_admitted() noexcept {
  State& state = *state_;
  if (!state.plan.is_open) return;
  state.plan.is_open = false;
  if (state.plan.changes_rows) {
    state.apply(state.plan.step);
  } else {
    state.last_step = state.plan.step;
  }
}

void IdTable::undo_admitted() noexcept {
  State& state = *state_;
  if (!state.plan.is_open) return;
  state.plan.is_open = false;
  for (const std::int64_t id : state.plan.new_ids) state.lines.erase(id);
  state.sketch.undo();
  state.deadlines.undo();
  for (std::size_t i = state.plan.found.size(); i-- > 0;) {
    if (state.plan.found[i] < 0) continue;
    RowRecord& record = *state.record(state.plan.found[i]);
    record.count = state.before[i].count;
    record.last_step = state.before[i].last_step;
  }
}

IdChanges IdTable::erase(std::span<const std::int64_t> ids) {
  State& state = *state_;
  IdChanges changes;
  std::vector<std::int64_t> rows(ids.size());
  find(ids, rows);
  std::erase(rows, -1);
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  for (const std::int64_t row : rows) changes.evicted_ids.push_back(state.record(row)->id);
  state.victims.assign(rows.begin(), rows.end());
  state.free_rows.reserve(state.free_rows.size() + rows.size());
  state.drop_victims();
  for (const std::int64_t row : rows) {
    state.free_rows.push_back(static_cast<std::uint32_t>(row));
    std::push_heap(state.free_rows.begin(), state.free_rows.end(), std::greater<std::uint32_t>());
  }
  changes.evicted_rows = std::move(rows);
  return changes;
}

void IdTable::clear() {
  State& state = *state_;
  state.lines.clear();
  state.records.clear();
  state.sketch.clear();
  state.deadlines.clear();
  state.free_rows.clear();
  std::fill(state.bucket_sizes.begin(), state.bucket_sizes.end(), 0);
  for (auto& list : state.bucket_rows) list.clear();
  state.num_rows = 0;
  state.size = 0;
  state.last_step = 0;
}

const std::vector<std::int64_t>& IdTable::bucket_sizes() const noexcept {
  return state_->bucket_sizes;
}

std::int64_t IdTable::size() const noexcept { return state_->size; }
std::int64_t IdTable::num_rows() const noexcept { return state_->num_rows; }

bool IdTable::has_row(std::int64_t row) const noexcept {
  return 0 <= row && row < state_->num_rows && state_->record(row)->count > 0;
}

namespace {

void check_row(const IdTable& table, std::int64_t row) {
  if (table.has_row(row)) return;
  throw std::out_of_range("id table '" + table.options().name + "': no id has row " +
                          std::to_string(row) + " of " + std::to_string(table.num_rows()) + ".");
}

}  // namespace

std::int64_t IdTable::id_of(std::int64_t row) const {
  check_row(*this, row);
  return state_->record(row)->id;
}
std::int64_t IdTable::count_of(std::int64_t row) const {
  check_row(*this, row);
  return state_->record(row)->count;
}
std::int64_t IdTable::last_step_of(std::int64_t row) const {
  check_row(*this, row);
  return state_->record(row)->last_step;
}

const IdTableOptions& IdTable::options() const noexcept { return state_->options; }

std::int64_t IdTable::bytes() const noexcept {
  const State& state = *state_;
  std::int64_t bytes = state.lines.bytes() + state.num_rows * sizeof(RowRecord) +
                       static_cast<std::int64_t>(state.free_rows.capacity() * 4) +
                       state.sketch.bytes() + state.deadlines.bytes();
  for (const auto& list : state.bucket_rows)
    bytes += static_cast<std::int64_t>(list.capacity() * 4);
  return bytes;
}

std::int64_t IdTable::huge_page_bytes() const {
  const std::int64_t lines = state_->lines.huge_page_bytes();
  const std::int64_t records = state_->records.huge_page_bytes();
  return lines < 0 || records < 0 ? -1 : lines + records;
}

std::int64_t IdTable::num_segments() const noexcept { return state_->lines.num_segments(); }

}  // namespace tessera::collision
