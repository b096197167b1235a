#include "tessera/collision/id_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <unordered_set>

#include "collision/frequency_sketch.h"
#include "collision/line_store.h"
#include "collision/reserved_memory.h"
#include "kernels/id_lines.h"

namespace tessera::collision {
namespace {

using kernels::bucket_of_hash;
using kernels::hash_id;
using kernels::RowRecord;
using kernels::TouchedRecord;

constexpr std::int64_t kMostRows = 0xffffffff;
constexpr std::int64_t kMostStep = 0xffffffff;

std::size_t index(std::int64_t number) { return static_cast<std::size_t>(number); }

void check(bool is_good, const std::string& name, const std::string& text) {
  if (!is_good) throw std::invalid_argument("id table '" + name + "': " + text);
}

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
  check(eviction.share >= 0 && eviction.share <= 1 && std::isfinite(eviction.decay_exponent),
        options.name, "the share of rows to evict must be 0 to 1, the decay exponent finite.");
  check(0 <= options.first_bucket && options.first_bucket <= options.end_bucket &&
            options.end_bucket <= kNumBuckets,
        options.name,
        "buckets " + std::to_string(options.first_bucket) + " to " +
            std::to_string(options.end_bucket) + " are not within 0 to 1024.");
  check(options.most_bytes >= 0, options.name, "the limit of bytes is negative.");
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
    for (std::size_t at = hash_id(id) & mask_;; at = (at + 1) & mask_) {
      if (places_[at] == 0) {
        entries_.push_back({id, count, -1});
        places_[at] = static_cast<std::uint32_t>(entries_.size());
        return;
      }
      Entry& entry = entries_[places_[at] - 1];
      if (entry.id == id) {
        entry.count += count;
        return;
      }
    }
  }
  std::int64_t row_of(std::int64_t id) const {
    std::size_t at = hash_id(id) & mask_;
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
struct Plan {
  bool is_open = false;
  bool changes_rows = false;
  std::int64_t step = 0;
  std::vector<std::int64_t> found;    // the row of every id as it was; -1: none
  std::vector<std::int64_t> new_ids;  // in the lines already
};

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

struct IdTable::State {
  explicit State(IdTableOptions wanted)
      : options(std::move(wanted)),
        lines(options.most_bytes),
        records(index(kMostRows) * sizeof(RowRecord)),
        protect(options.protect.begin(), options.protect.end()),
        bucket_sizes(kNumBuckets),
        bucket_rows(keeps_lists() ? kNumBuckets : 0) {}

  bool keeps_lists() const {
    return options.capacity > 0 && options.eviction.kind != EvictionKind::kNone;
  }
  std::int64_t bucket_capacity() const {
    return (options.capacity + kNumBuckets - 1) / kNumBuckets;
  }
  RowRecord* record(std::int64_t row) const {
    return static_cast<RowRecord*>(records.data()) + row;
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
  bool may_go(const RowRecord& record, std::int64_t step) const;
  void plan_rows();
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
  std::vector<std::uint32_t> free_rows;  // a heap, the lowest on top
  std::int64_t num_rows = 0;
  std::int64_t size = 0;
  std::int64_t last_step = 0;

  // Of the batch at hand; kept for the next one's use of the memory.
  Misses misses;
  Plan plan;
  std::vector<TouchedRecord> before;
  std::vector<std::uint32_t> victims;     // rows
  std::vector<std::uint32_t> free_after;  // the heap as it will be
  std::int64_t rows_after = 0;
  std::int64_t num_refused = 0;
};

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
  const Eviction& eviction = options.eviction;
  if (eviction.kind != EvictionKind::kTimeToLive || step % eviction.interval != 0) return;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    if (may_go(*record(row), step)) victims.push_back(static_cast<std::uint32_t>(row));
  }
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
void IdTable::State::plan_rows() {
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
  }
  for (std::size_t bucket = 0; bucket < more.size(); ++bucket) {
    std::vector<std::uint32_t>& list = bucket_rows[bucket];
    const std::size_t needed = list.size() + more[bucket];
    if (needed > list.capacity()) list.reserve(std::max(needed, list.size() + list.size() / 2));
  }
  if (rows_after > num_rows) reserve_rows(rows_after);
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
}

IdTable::IdTable(IdTableOptions options) {
  check_options(options);
  state_ = std::make_unique<State>(std::move(options));
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
  Plan& plan = state.plan;
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
    const bool expires = state.options.eviction.kind == EvictionKind::kTimeToLive &&
                         step % state.options.eviction.interval == 0;
    if (num_missing > 0 || expires) {
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

/// Decides about the misses and puts the new ids into the lines.
void IdTable::State::place(std::int64_t step, IdChanges& changes) {
  const bool has_all = options.first_bucket == 0 && options.end_bucket == kNumBuckets;
  for (const Misses::Entry& miss : misses.entries()) {
    if (!has_all) check_bucket(miss.id);
  }
  decide(step);
  make_room(step);
  plan_rows();
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
  state.free_rows.clear();
  std::fill(state.bucket_sizes.begin(), state.bucket_sizes.end(), 0);
  for (auto& list : state.bucket_rows) list.clear();
  state.num_rows = 0;
  state.size = 0;
  state.last_step = 0;
}

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
      ++state.num_rows;
      ++state.size;
      state.last_step = std::max(state.last_step, last_steps[index(row)]);
    }
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

const std::vector<std::int64_t>& IdTable::bucket_sizes() const noexcept {
  return state_->bucket_sizes;
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
  state_->sketch.load(sketch);
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
                       state.sketch.bytes();
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
