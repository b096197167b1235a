#include "collision/line_store.h"

#include <algorithm>
#include <bitset>
#include <memory>
#include <new>
#include <thread>
#include <utility>

namespace tessera::collision {
namespace {

using kernels::hash_id;
using kernels::IdLine;
using kernels::kLinesPerSegment;
using kernels::kMostLines;
using kernels::kSlotsPerLine;

constexpr unsigned kAllSlots = (1U << kSlotsPerLine) - 1;
constexpr std::size_t kSegmentBytes = sizeof(IdLine) * kLinesPerSegment;
// 2^32 rows at the least load that splitting leaves.
constexpr std::size_t kMostLineBytes = std::size_t{1} << 38;
// Bits of the hash above the line's and the bucket's.
constexpr int kMostDepth = 44;
// Segments split at different loads between these, so that those of one depth, which fill alike, do
// not all split in the same few batches. A half keeps at least half of the lower one.
constexpr int kLeastLimit = 2560;
constexpr int kMostLimit = 3891;
constexpr std::uint16_t kNoLimit = 0xffff;
// Hashes of honest ids leave segments of two depths. A directory this much larger than the number
// of segments is the work of ids chosen to be alike.
constexpr int kSpareDepth = 12;

// What readers may read meanwhile. Each store comes after those before it, each load before those
// after it: on x86 both are plain moves.
template <typename T>
void put(T& place, T value) {
  __atomic_store_n(&place, value, __ATOMIC_RELEASE);
}
template <typename T>
T get(const T& place) {
  return __atomic_load_n(&place, __ATOMIC_ACQUIRE);
}

void put_occupied(IdLine& line, unsigned occupied) {
  put(line.occupied, static_cast<std::uint8_t>(occupied));
}

IdLine& line_at(IdLine* segment, std::uint64_t hash, unsigned step) {
  return segment[(hash + step) % kLinesPerSegment];
}

/// How many lines behind its own an id lies in `line`.
unsigned steps_to(std::uint64_t hash, std::int64_t line) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(line) - hash) % kLinesPerSegment);
}

struct Place {
  IdLine* line;
  unsigned steps;
  int slot;
};

/// The first free slot within reach; `line` is null if there is none.
Place free_place(IdLine* segment, std::uint64_t hash, unsigned num_lines = kMostLines) {
  for (unsigned step = 0; step < num_lines; ++step) {
    IdLine& line = line_at(segment, hash, step);
    if (line.occupied != kAllSlots) return {&line, step, __builtin_ctz(~unsigned{line.occupied})};
  }
  return {nullptr, 0, 0};
}

void fill(const Place& place, std::int64_t id, std::uint32_t row) {
  put(place.line->keys[place.slot], id);
  put(place.line->rows[place.slot], row);
  put_occupied(*place.line, place.line->occupied | 1U << place.slot);
}

/// Changes the overflow of the lines that an id at so many steps was pushed past.
void add_overflow(IdLine* segment, std::uint64_t hash, unsigned steps, int change) {
  for (unsigned step = 0; step < steps; ++step) {
    IdLine& line = line_at(segment, hash, step);
    put(line.overflow, static_cast<std::uint8_t>(line.overflow + change));
  }
}

/// Moves ids nearer to their line where there is room now, and counts those that stay behind. It
/// takes no memory: half-way there is no way back.
void settle(IdLine* segment) noexcept {
  std::bitset<kLinesPerSegment> has_others;  // lines with ids of lines before them
  for (std::int64_t at = 0; at < kLinesPerSegment; ++at) {
    IdLine& line = segment[at];
    // Only behind a line that pushed ids on do others lie than a line's own.
    const bool has_own_only = segment[(at + kLinesPerSegment - 1) % kLinesPerSegment].overflow == 0;
    if (has_own_only || line.occupied == 0) continue;
    for (int slot = 0; slot < kSlotsPerLine; ++slot) {
      if ((line.occupied >> slot & 1U) == 0) continue;
      const std::uint64_t hash = hash_id(line.keys[slot]);
      const unsigned steps = steps_to(hash, at);
      if (steps == 0) continue;
      const Place nearer = free_place(segment, hash, steps);
      if (nearer.line == nullptr) {
        has_others.set(static_cast<std::size_t>(at));
        continue;
      }
      fill(nearer, line.keys[slot], line.rows[slot]);
      put_occupied(line, line.occupied & ~(1U << slot));
      if (nearer.steps != 0) has_others.set(static_cast<std::size_t>(nearer.line - segment));
    }
  }
  for (std::int64_t at = 0; at < kLinesPerSegment; ++at) {
    if (segment[at].overflow != 0) put(segment[at].overflow, std::uint8_t{0});
  }
  for (std::int64_t at = 0; at < kLinesPerSegment; ++at) {
    if (!has_others[static_cast<std::size_t>(at)]) continue;
    for (int slot = 0; slot < kSlotsPerLine; ++slot) {
      if ((segment[at].occupied >> slot & 1U) == 0) continue;
      const std::uint64_t hash = hash_id(segment[at].keys[slot]);
      add_overflow(segment, hash, steps_to(hash, at), 1);
    }
  }
}

}  // namespace

namespace {

std::uint16_t limit_of(std::size_t segment) {
  const std::uint64_t draw =
      hash_id(static_cast<std::int64_t>(segment)) % (kMostLimit - kLeastLimit);
  return static_cast<std::uint16_t>(kLeastLimit + draw);
}

}  // namespace

/// While it lives, readers of a segment wait.
class LineStore::Change {
 public:
  explicit Change(std::uint32_t* version) : version_(version) { put(*version_, *version_ + 1); }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;
  ~Change() { put(*version_, *version_ + 1); }

 private:
  std::uint32_t* version_;
};

LineStore::LineStore(std::int64_t most_bytes)
    : memory_(kMostLineBytes),
      versions_(kMostLineBytes / kSegmentBytes * sizeof(std::uint32_t)),
      most_bytes_(most_bytes) {
  clear();
}

void LineStore::publish(std::unique_ptr<Directory> next) {
  directories_.push_back(std::move(next));
  current_.store(directories_.back().get(), std::memory_order_release);
}

void LineStore::prefetch(std::int64_t id) const noexcept {
  const std::uint64_t hash = hash_id(id);
  __builtin_prefetch(segment(segment_of(hash)) + hash % kLinesPerSegment, 1);
}

void LineStore::clear() {
  memory_.clear();
  versions_.clear();
  local_depth_.clear();
  sizes_.clear();
  limits_.clear();
  depth_ = 1;
  directories_.clear();
  publish(std::make_unique<Directory>(depth_));
  if (!add_segment(0)) throw std::bad_alloc();
}

IdLine* LineStore::segment(std::uint32_t number) const noexcept {
  return static_cast<IdLine*>(memory_.data()) + static_cast<std::size_t>(number) * kLinesPerSegment;
}

kernels::IdLines LineStore::view() const noexcept {
  return {segment(0), directory().entries.get(), directory().shift};
}

std::int64_t LineStore::bytes() const noexcept {
  // Beside its lines a segment has a version, a depth, a size and a limit; directories that became
  // too small are together as large as the last.
  return static_cast<std::int64_t>(local_depth_.size() * (kSegmentBytes + 9) +
                                   (std::size_t{2} << depth_) * sizeof(std::uint32_t));
}

bool LineStore::add_segment(int depth) {
  const std::size_t bytes = (local_depth_.size() + 1) * kSegmentBytes;
  if (most_bytes_ != 0 && static_cast<std::int64_t>(bytes) > most_bytes_) return false;
  if (!memory_.grow(bytes) || !versions_.grow((local_depth_.size() + 1) * sizeof(std::uint32_t))) {
    return false;
  }
  // The depths say how many segments there are: without memory for all three, one more than before
  // has a size and a limit, and none knows of it.
  const std::size_t number = local_depth_.size();
  limits_.resize(number + 1);
  sizes_.resize(number + 1);
  local_depth_.resize(number + 1, static_cast<std::uint8_t>(depth));
  limits_[number] = limit_of(number);
  sizes_[number] = 0;
  return true;
}

std::int64_t LineStore::find(std::int64_t id) const noexcept {
  std::int64_t row = -1;
  kernels::id_line_kernels().find_rows(view(), &id, 1, &row);
  return row;
}

Placed LineStore::insert(std::int64_t id, std::uint32_t row) {
  const std::uint64_t hash = hash_id(id);
  while (true) {
    const std::uint32_t number = segment_of(hash);
    if (sizes_[number] >= limits_[number]) {
      if (split(hash) == Placed::kYes) continue;
      limits_[number] = kNoLimit;  // as long as there is room
    }
    IdLine* lines = segment(number);
    const Place place = free_place(lines, hash);
    if (place.line != nullptr) {
      const Change change(version(number));
      fill(place, id, row);
      add_overflow(lines, hash, place.steps, 1);
      ++sizes_[number];
      return Placed::kYes;
    }
    const Placed done = split(hash);
    if (done != Placed::kYes) return done;
  }
}

Placed LineStore::split(std::uint64_t hash) {
  const std::uint32_t old_number = segment_of(hash);
  const int depth = local_depth_[old_number];
  if (depth == kMostDepth) return Placed::kTooManyAlike;
  if (depth == depth_) {
    if (depth_ >= kSpareDepth && (num_segments() << kSpareDepth) < (std::int64_t{1} << depth_)) {
      return Placed::kTooManyAlike;
    }
    auto larger = std::make_unique<Directory>(depth_ + 1);
    for (std::size_t i = 0; i < std::size_t{1} << depth_; ++i) {
      larger->entries[2 * i] = larger->entries[2 * i + 1] = directory().entries[i];
    }
    publish(std::move(larger));
    ++depth_;
  }
  if (!add_segment(depth + 1)) return Placed::kNoMemory;
  local_depth_[old_number] = static_cast<std::uint8_t>(depth + 1);
  const auto new_number = static_cast<std::uint32_t>(num_segments() - 1);
  IdLine* from = segment(old_number);
  IdLine* to = segment(new_number);
  const int bit = 63 - depth;
  int num_moved = 0;
  const Change change(version(old_number));
  for (std::int64_t at = 0; at < kLinesPerSegment; ++at) {
    unsigned moved = 0;
    for (int slot = 0; slot < kSlotsPerLine; ++slot) {
      moved |= static_cast<unsigned>(hash_id(from[at].keys[slot]) >> bit & 1U) << slot;
    }
    moved &= from[at].occupied;
    num_moved += __builtin_popcount(moved);
    to[at] = from[at];
    to[at].occupied = static_cast<std::uint8_t>(moved);
    put_occupied(from[at], from[at].occupied & ~moved);
  }
  settle(from);
  settle(to);
  sizes_[new_number] = static_cast<std::uint16_t>(num_moved);
  sizes_[old_number] = static_cast<std::uint16_t>(sizes_[old_number] - num_moved);
  limits_[old_number] = limit_of(old_number + local_depth_.size());
  // The entries of the old segment are those with the same `depth` top bits; the upper half moves.
  const int spare = depth_ - depth;
  const std::uint64_t first = hash >> (64 - depth_) >> spare << spare;
  const std::uint64_t half = std::uint64_t{1} << (spare - 1);
  for (std::uint64_t i = first + half; i < first + 2 * half; ++i) {
    put(directory().entries[i], new_number);
  }
  return Placed::kYes;
}

namespace {

std::int64_t search(const IdLine* segment, std::uint64_t hash, std::int64_t id) {
  for (unsigned step = 0; step < kMostLines; ++step) {
    const IdLine& line = segment[(hash + step) % kLinesPerSegment];
    const unsigned occupied = get(line.occupied);
    for (int slot = 0; slot < kSlotsPerLine; ++slot) {
      if ((occupied >> slot & 1U) != 0 && get(line.keys[slot]) == id) return get(line.rows[slot]);
    }
    if (get(line.overflow) == 0) return -1;
  }
  return -1;
}

}  // namespace

std::int64_t LineStore::read(std::uint64_t hash, std::int64_t id) const noexcept {
  // A split is over in microseconds, unless its thread has lost the processor.
  constexpr int kSpins = 64;
  for (int tries = 0;; ++tries) {
    if (tries > kSpins) std::this_thread::yield();
    const Directory* known = current_.load(std::memory_order_acquire);
    const std::uint32_t& entry = known->entries[hash >> known->shift];
    const std::uint32_t number = get(entry);
    const std::uint32_t before = get(*version(number));
    if (before % 2 != 0) continue;
    // A split between the two loads may have moved the id to another segment.
    if (current_.load(std::memory_order_acquire) != known || get(entry) != number) continue;
    const std::int64_t row = search(segment(number), hash, id);
    if (get(*version(number)) == before) return row;
  }
}

void LineStore::read(std::span<const std::int64_t> ids,
                     std::span<std::int64_t> rows) const noexcept {
  constexpr std::size_t kBlock = 32;
  std::uint64_t hashes[kBlock];
  for (std::size_t begin = 0; begin < ids.size(); begin += kBlock) {
    const std::size_t count = std::min(kBlock, ids.size() - begin);
    const Directory* known = current_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < count; ++i) {
      hashes[i] = hash_id(ids[begin + i]);
      const std::uint32_t number = get(known->entries[hashes[i] >> known->shift]);
      __builtin_prefetch(segment(number) + hashes[i] % kLinesPerSegment);
    }
    for (std::size_t i = 0; i < count; ++i) rows[begin + i] = read(hashes[i], ids[begin + i]);
  }
}

void LineStore::erase(std::int64_t id) noexcept {
  const std::uint64_t hash = hash_id(id);
  const std::uint32_t number = segment_of(hash);
  IdLine* lines = segment(number);
  for (unsigned step = 0; step < kMostLines; ++step) {
    IdLine& line = line_at(lines, hash, step);
    for (int slot = 0; slot < kSlotsPerLine; ++slot) {
      if ((line.occupied >> slot & 1U) == 0 || line.keys[slot] != id) continue;
      const Change change(version(number));
      put_occupied(line, line.occupied & ~(1U << slot));
      add_overflow(lines, hash, step, -1);
      --sizes_[number];
      return;
    }
  }
}

}  // namespace tessera::collision
