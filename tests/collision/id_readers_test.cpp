// Threads that look ids up beside one that admits, evicts and erases while the table grows: what is
// always there is always found, with its row, and nobody sees a pair that never was.

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/collision/id_table.h"

namespace tessera::collision {
namespace {

using Pair = std::pair<std::int64_t, std::int64_t>;

// Different hashes are different ids, and both kinds are spread over the whole range.
std::int64_t lasting_id(std::int64_t i) {
  return id_of_hash(2 * static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15U);
}
std::int64_t passing_id(std::int64_t i) {
  return id_of_hash((2 * static_cast<std::uint64_t>(i) + 1) * 0x9e3779b97f4a7c15U);
}

struct Seen {
  std::set<Pair> passing;
  std::int64_t num_wrong = 0;
  std::int64_t num_read = 0;
};

/// Looks ids up until told to stop: lasting ones up to the number that is promised to be there, and
/// any of the passing ones.
Seen look_up(const IdTable& table, const std::vector<std::atomic<std::int64_t>>& rows,
             const std::atomic<std::int64_t>& num_lasting, std::int64_t num_passing,
             const std::atomic<bool>& is_done, unsigned seed) {
  Seen seen;
  std::mt19937_64 random(seed);
  constexpr std::size_t kBatch = 64;
  while (!is_done.load() || seen.num_read == 0) {
    const std::int64_t there = num_lasting.load();
    std::vector<std::int64_t> numbers(kBatch);
    std::vector<std::int64_t> ids(kBatch);
    std::vector<std::int64_t> found(kBatch);
    for (std::size_t i = 0; i < kBatch; ++i) {
      const bool is_lasting = i % 2 == 0 && there > 0;
      const std::int64_t most = is_lasting ? there : num_passing;
      numbers[i] = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most));
      ids[i] = is_lasting ? lasting_id(numbers[i]) : passing_id(numbers[i]);
    }
    table.find_beside(ids, found);
    for (std::size_t i = 0; i < kBatch; ++i) {
      if (i % 2 == 0 && there > 0) {
        seen.num_wrong += found[i] != rows[static_cast<std::size_t>(numbers[i])].load() ? 1 : 0;
      } else if (found[i] >= 0) {
        seen.passing.emplace(ids[i], found[i]);
      }
    }
    ++seen.num_read;
  }
  return seen;
}

TEST(IdReaders, SeeNothingThatNeverWas) {
  constexpr std::int64_t kLasting = 120'000;  // some 40 segments, so as many splits
  constexpr std::int64_t kPassing = 20'000;
  IdTable table(
      {.name = "read",
       .eviction = {.kind = EvictionKind::kTimeToLive, .time_to_live = 3, .interval = 2}});
  std::vector<std::atomic<std::int64_t>> rows(kLasting);
  std::atomic<std::int64_t> num_lasting = 0;
  std::atomic<bool> is_done = false;
  std::set<Pair> given;

  std::vector<Seen> seen(2);
  std::vector<std::thread> readers;
  for (unsigned r = 0; r < seen.size(); ++r) {
    readers.emplace_back(
        [&, r] { seen[r] = look_up(table, rows, num_lasting, kPassing, is_done, r + 1); });
  }
  std::mt19937_64 random(5);
  std::int64_t step = 0;
  for (std::int64_t first = 0; first < kLasting; first += 3000) {
    // Ids that stay are seen in every step; others come, and go by age or by name.
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < first + 3000; ++i) ids.push_back(lasting_id(i));
    for (int i = 0; i < 2000; ++i) {
      ids.push_back(passing_id(static_cast<std::int64_t>(random() % kPassing)));
    }
    std::vector<std::int64_t> got(ids.size());
    const IdChanges changes = table.admit(ids, {}, ++step, got);
    for (std::size_t i = 0; i < changes.new_ids.size(); ++i) {
      given.emplace(changes.new_ids[i], changes.new_rows[i]);
    }
    for (std::int64_t i = first; i < first + 3000; ++i) {
      rows[static_cast<std::size_t>(i)].store(got[static_cast<std::size_t>(i)]);
    }
    num_lasting.store(first + 3000);
    // A batch that is taken back was there for a moment.
    std::vector<std::int64_t> undone(500);
    for (std::int64_t& id : undone) id = passing_id(static_cast<std::int64_t>(random() % kPassing));
    std::vector<std::int64_t> planned(undone.size());
    table.plan_admit(undone, {}, step, planned);
    for (std::size_t i = 0; i < undone.size(); ++i) given.emplace(undone[i], planned[i]);
    table.undo_admitted();
    std::vector<std::int64_t> gone(300);
    for (std::int64_t& id : gone) id = passing_id(static_cast<std::int64_t>(random() % kPassing));
    table.erase(gone);
  }
  is_done.store(true);
  for (std::thread& reader : readers) reader.join();
  EXPECT_GT(table.num_segments(), 16);
  for (const Seen& one : seen) {
    EXPECT_EQ(one.num_wrong, 0) << "of " << one.num_read << " batches";
    for (const Pair& pair : one.passing) {
      EXPECT_TRUE(given.contains(pair)) << "id " << pair.first << " with row " << pair.second;
    }
  }
}

TEST(IdReaders, FindWhatFindFinds) {
  IdTable table;
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < 50'000; ++i) ids.push_back(lasting_id(i));
  std::vector<std::int64_t> rows(ids.size());
  table.admit(ids, {}, 1, rows);
  for (std::int64_t i = 0; i < 1000; ++i) ids.push_back(passing_id(i));
  std::vector<std::int64_t> plain(ids.size());
  std::vector<std::int64_t> beside(ids.size());
  table.find(ids, plain);
  table.find_beside(ids, beside);
  EXPECT_EQ(plain, beside);
  EXPECT_THROW(table.find_beside(ids, std::span(beside).first(3)), std::invalid_argument);
  table.find_beside({}, {});
}

}  // namespace
}  // namespace tessera::collision
