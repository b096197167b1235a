// tessera/collision/id_table.h — any 64-bit id onto a row number, without collisions.
//
// A hash table that grows by splitting one segment of 64 KiB at a time, so that no batch waits for
// the whole table. Beside it a record per row: whose it is, how often and when it was last seen;
// admission and eviction decide by these. What they decide depends on the ids, their order and the
// step alone: never on threads, row numbers or how many ranks share the table. Needs no LibTorch.
//
// The hash is part of the format of checkpoints, as kIdHashName.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/export.h"

namespace tessera::collision {

/// How many shard buckets there are, whatever the world size. Ranks own runs of them.
inline constexpr int kNumBuckets = 1024;
inline constexpr std::string_view kIdHashName = "xmx64-1";

/// The hash of an id: a bijection, so that different ids have different hashes.
TESSERA_API std::uint64_t id_hash(std::int64_t id) noexcept;
/// The id that has the hash.
TESSERA_API std::int64_t id_of_hash(std::uint64_t hash) noexcept;
/// The shard bucket of an id, 0 to 1023: bits 10 to 19 of its hash.
TESSERA_API int bucket_of(std::int64_t id) noexcept;

/// Which unknown ids get a row.
enum class AdmissionKind : std::uint8_t {
  kAlways,
  kFrequency,    // from the n-th sighting on, counted in a sketch of 16 KiB per bucket
  kProbability,  // seen c times in the call: with probability 1 - (1 - p)^c
};
struct Admission {
  AdmissionKind kind = AdmissionKind::kAlways;
  /// kFrequency: 1 to 255. The sketch halves its counts every 2^14 sightings of a bucket.
  std::int64_t sightings = 1;
  /// kProbability: above 0, at most 1. Decided by a hash of id, step and seed.
  double probability = 1.0;
  std::uint64_t seed = 0;
};

/// Which ids lose their row when a bucket is full. Of equal ones the lower last step goes first,
/// then the smaller id. A row that was seen in the same step stays.
enum class EvictionKind : std::uint8_t {
  kNone,
  kLfu,          // least count
  kLru,          // lowest last step
  kDistanceLfu,  // least count / (step - last step + 1)^decay_exponent
  kTimeToLive,   // not seen for more than time_to_live steps; looked for every `interval` steps,
                 // and whenever a bucket is full
};
struct Eviction {
  EvictionKind kind = EvictionKind::kNone;
  double decay_exponent = 1.0;
  std::int64_t time_to_live = 0;
  std::int64_t interval = 1;
  /// A full bucket gives up at least this part of its rows at once.
  double share = 1.0 / 256;
};

struct IdTableOptions {
  /// For the errors.
  std::string name = "ids";
  /// Rows the table may have over all ranks; 0: no limit. Every bucket has a 1024th part, rounded
  /// up, so the table may hold up to 1023 more.
  std::int64_t capacity = 0;
  Admission admission = {};
  Eviction eviction = {};
  /// What becomes of ids that find no room: true: they stay unknown; false: IdTableFull.
  bool refuse_when_full = false;
  /// These keep their rows.
  std::vector<std::int64_t> protect = {};
  /// The buckets this table is for.
  int first_bucket = 0;
  int end_bucket = kNumBuckets;
  /// Memory for lines and records; 0: what the system gives.
  std::int64_t most_bytes = 0;
};

/// What one call changed.
struct IdChanges {
  /// Ids that got a row, and the row, in order of their first appearance.
  std::vector<std::int64_t> new_ids;
  std::vector<std::int64_t> new_rows;
  /// Ids that lost theirs. The rows may be among `new_rows`.
  std::vector<std::int64_t> evicted_ids;
  std::vector<std::int64_t> evicted_rows;
  /// Positions whose id had a row before the call.
  std::int64_t num_found = 0;
  /// Different ids that were admitted but found no room.
  std::int64_t num_refused = 0;
};

/// Rows in order of bucket and row, as checkpoints hold them.
struct IdList {
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> counts;
  std::vector<std::int64_t> last_steps;
};

/// The part of the state of `Admission::kFrequency` that is not in the rows: per bucket 4 x 4096
/// counters, and sightings since the last halving. Empty buckets are left out.
struct IdSketch {
  std::vector<std::int64_t> buckets;
  std::vector<std::uint8_t> counters;
  std::vector<std::int64_t> sightings;
};

/// What an id table cannot do. The table is as it was before the call.
class TESSERA_API IdTableError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
/// A bucket is full and nothing may go.
class TESSERA_API IdTableFull : public IdTableError {
 public:
  IdTableFull(const std::string& text, std::string table, std::int64_t capacity, int bucket)
      : IdTableError(text), table(std::move(table)), capacity(capacity), bucket(bucket) {}
  std::string table;
  std::int64_t capacity;
  int bucket;
};
/// More than 2^32 - 1 rows on one rank.
class TESSERA_API TooManyRows : public IdTableError {
 public:
  using IdTableError::IdTableError;
};
/// The system, or `most_bytes`, gives no more memory.
class TESSERA_API IdMemoryError : public IdTableError {
 public:
  using IdTableError::IdTableError;
};
/// A list of ids that no table can have written: an id twice, or of another bucket.
class TESSERA_API IdListError : public IdTableError {
 public:
  using IdTableError::IdTableError;
};

/// Runs the function over parts of [0, count) that together are all of it, maybe at once.
using Parallel =
    std::function<void(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>&)>;

/// Ids and the rows they have, 0 to num_rows() - 1. `find` may run on several threads at once, but
/// not beside a call that changes the table; `find_beside` may.
class TESSERA_API IdTable {
 public:
  /// Throws std::invalid_argument for options that cannot be.
  explicit IdTable(IdTableOptions options = {});
  IdTable(IdTable&&) noexcept;
  IdTable& operator=(IdTable&&) noexcept;
  ~IdTable();

  /// rows[i]: the row of ids[i], or -1. Changes nothing.
  void find(std::span<const std::int64_t> ids, std::span<std::int64_t> rows,
            const Parallel& parallel = {}) const;

  /// The same on any number of threads beside one that calls admit, plan_admit and what follows it,
  /// or erase. An id that has its row all the while is found with it; one that gets or loses it
  /// meanwhile is found with it or not at all. Rows of evicted ids are given away: who reads them
  /// by number must know that nobody has begun to write them. Waits while a segment of it splits,
  /// some tens of microseconds; takes no lock.
  void find_beside(std::span<const std::int64_t> ids, std::span<std::int64_t> rows) const;

  /// As `find`, and counts what was seen, admits unknown ids, evicts for them. `counts`: how often
  /// each id was seen, at least 1; empty: once. An id may come several times.
  ///
  /// Rows are given in order of first appearance: free ones first, the lowest first, then new ones.
  /// `step` is 0 to 2^32 - 1 and does not fall. On an error nothing has changed.
  IdChanges admit(std::span<const std::int64_t> ids, std::span<const std::int64_t> counts,
                  std::int64_t step, std::span<std::int64_t> rows);

  /// `admit` in two halves, for callers who must hear from others first: the same rows and changes
  /// as told by `admit`, of which nothing is true until `keep_admitted`. `undo_admitted` takes
  /// everything back, counts included. One of the two comes before any other call that changes the
  /// table.
  IdChanges plan_admit(std::span<const std::int64_t> ids, std::span<const std::int64_t> counts,
                       std::int64_t step, std::span<std::int64_t> rows);
  void keep_admitted() noexcept;
  void undo_admitted() noexcept;

  /// Takes the rows of these ids away; those without one are skipped.
  IdChanges erase(std::span<const std::int64_t> ids);
  void clear();

  /// Fills an empty table: ids[i] gets row i. Throws IdListError for an id twice, naming both rows,
  /// and for one of a bucket the table is not for; the table is empty then.
  void load(std::span<const std::int64_t> ids, std::span<const std::int64_t> counts,
            std::span<const std::int64_t> last_steps);
  /// The ids last seen in step `since` or later, in order of bucket and row; by default all.
  IdList export_ids(std::int64_t since = 0) const;
  /// How many ids each of the 1024 buckets has.
  const std::vector<std::int64_t>& bucket_sizes() const noexcept;
  IdSketch export_sketch() const;
  /// Throws IdListError for a sketch of another size or of buckets the table is not for.
  void load_sketch(const IdSketch& sketch);

  /// Ids that have a row.
  std::int64_t size() const noexcept;
  /// Rows in use or free; every row is below it.
  std::int64_t num_rows() const noexcept;
  bool has_row(std::int64_t row) const noexcept;
  /// The id, count and last step of a row. Throws std::out_of_range if nobody has it.
  std::int64_t id_of(std::int64_t row) const;
  std::int64_t count_of(std::int64_t row) const;
  std::int64_t last_step_of(std::int64_t row) const;

  const IdTableOptions& options() const noexcept;
  /// Memory of lines, records, directory and lists.
  std::int64_t bytes() const noexcept;
  /// How much of it lies in huge pages; -1 where the system does not say. Reads a file of /proc.
  std::int64_t huge_page_bytes() const;
  std::int64_t num_segments() const noexcept;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace tessera::collision
