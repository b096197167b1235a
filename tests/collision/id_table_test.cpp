// The id table against a plain map, and every instruction set against the plain loops.

#include "tessera/collision/id_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "collision/id_table_state.h"
#include "collision/line_store.h"
#include "collision/row_deadlines.h"
#include "kernels/id_lines.h"
#include "kernels/row_init.h"
#include "tessera/collision/row_init.h"

namespace tessera::collision {
namespace {

using Ids = std::vector<std::int64_t>;

constexpr std::int64_t kLow = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kHigh = std::numeric_limits<std::int64_t>::max();

Ids find(const IdTable& table, const Ids& ids) {
  Ids rows(ids.size());
  table.find(ids, rows);
  return rows;
}

struct Admitted {
  Ids rows;
  IdChanges changes;
};

Admitted admit(IdTable& table, const Ids& ids, std::int64_t step, const Ids& counts = {}) {
  Admitted result{Ids(ids.size()), {}};
  result.changes = table.admit(ids, counts, step, result.rows);
  return result;
}

std::int64_t operations(std::int64_t otherwise = 1'000'000) {
  const char* wanted = std::getenv("TESSERA_ID_OPERATIONS");
  return wanted == nullptr ? otherwise : std::atoll(wanted);
}

/// The id whose hash has these segment, bucket and line bits.
std::int64_t id_at(std::uint64_t segment, std::uint64_t bucket, std::uint64_t line) {
  return id_of_hash(segment << 20 | bucket << 10 | line);
}

/// Ids of one bucket: number i of bucket b.
std::int64_t id_in(int bucket, std::uint64_t number) {
  return id_at(number * 0x9e3779b97f4U & ((std::uint64_t{1} << 44) - 1),
               static_cast<std::uint64_t>(bucket), number * 37 % 1024);
}

TEST(IdHash, IsABijectionWithAnInverse) {
  std::mt19937_64 random(1);
  for (const std::int64_t id : {std::int64_t{0}, std::int64_t{-1}, kLow, kHigh}) {
    EXPECT_EQ(id_of_hash(id_hash(id)), id);
  }
  for (int i = 0; i < 10000; ++i) {
    const auto id = static_cast<std::int64_t>(random());
    ASSERT_EQ(id_of_hash(id_hash(id)), id);
    ASSERT_EQ(bucket_of(id), static_cast<int>(id_hash(id) >> 10 & 1023));
  }
  // The format: these values are in checkpoints.
  EXPECT_EQ(id_hash(0), 0U);
  EXPECT_EQ(id_hash(1), 0x4179b061e0c0e0d0U);
  EXPECT_EQ(id_hash(-1), 0x448e29ced4103459U);
}

TEST(IdTable, EveryIdOfTheRangeIsLegal) {
  IdTable table;
  const Ids ids = {0, -1, kLow, kHigh, kLow + 1, kHigh - 1, 1};
  EXPECT_EQ(find(table, ids), Ids(ids.size(), -1));
  EXPECT_EQ(admit(table, ids, 0).rows, (Ids{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(find(table, ids), (Ids{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(table.id_of(3), kHigh);
  EXPECT_EQ(table.size(), 7);
  table.erase(Ids{0, kHigh, 12345});
  EXPECT_EQ(find(table, ids), (Ids{-1, 1, 2, -1, 4, 5, 6}));
}

TEST(IdTable, RowsAreGivenInOrderOfFirstAppearance) {
  IdTable table;
  const auto first = admit(table, {10, 10, 11, 10, 12}, 5, {1, 2, 1, 4, 1});
  EXPECT_EQ(first.rows, (Ids{0, 0, 1, 0, 2}));
  EXPECT_EQ(first.changes.new_ids, (Ids{10, 11, 12}));
  EXPECT_EQ(table.count_of(0), 7);
  EXPECT_EQ(table.last_step_of(0), 5);
  EXPECT_EQ(table.erase(Ids{11, 10, 11}).evicted_rows, (Ids{0, 1}));
  // The lowest free row first, then new ones.
  EXPECT_EQ(admit(table, {20, 12, 21, 22}, 6).rows, (Ids{0, 2, 1, 3}));
  EXPECT_EQ(table.count_of(2), 2);
  EXPECT_EQ(table.num_rows(), 4);
  EXPECT_THROW(static_cast<void>(table.id_of(4)), std::out_of_range);
}

TEST(IdTable, CountsStopAtTheirLargestValue) {
  IdTable table;
  admit(table, {7, 8}, 0, {0xfffffffe, std::int64_t{1} << 40});
  admit(table, {7, 7, 7}, 1);
  EXPECT_EQ(table.count_of(0), 0xffffffff);
  EXPECT_EQ(table.count_of(1), 0xffffffff);
}

/// Traffic of new, known and erased ids, the table beside a plain map.
TEST(IdTable, AgreesWithAPlainMapUnderTraffic) {
  std::mt19937_64 random(7);
  IdTable table;
  std::unordered_map<std::int64_t, std::int64_t> rows_of;
  std::unordered_map<std::int64_t, std::int64_t> counts_of;
  Ids known;
  std::set<std::int64_t> free;
  std::int64_t num_rows = 0;
  std::int64_t step = 0;
  for (std::int64_t done = 0; done < operations(); ++step) {
    Ids batch(1 + random() % 4000);
    for (std::int64_t& id : batch) {
      const bool is_old = !known.empty() && random() % 2 == 0;
      id = is_old ? known[random() % known.size()] : static_cast<std::int64_t>(random());
      if (random() % 1000 == 0) id = static_cast<std::int64_t>(random() % 3) - 1;
    }
    done += static_cast<std::int64_t>(batch.size());
    const auto got = admit(table, batch, step);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto [place, is_new] = rows_of.try_emplace(batch[i], -1);
      if (is_new) {
        place->second = free.empty() ? num_rows++ : *free.begin();
        if (!free.empty()) free.erase(free.begin());
        known.push_back(batch[i]);
      }
      ++counts_of[batch[i]];
      ASSERT_EQ(got.rows[i], place->second) << "step " << step << ", position " << i;
    }
    if (random() % 4 != 0) continue;
    Ids gone(random() % 3000);
    for (std::int64_t& id : gone) {
      const std::size_t place = random() % known.size();
      id = known[place];
      known[place] = known.back();  // may name an id twice, or one that has gone
    }
    const IdChanges changes = table.erase(gone);
    std::size_t num_gone = 0;
    for (const std::int64_t id : gone) {
      const auto place = rows_of.find(id);
      if (place == rows_of.end()) continue;
      free.insert(place->second);
      rows_of.erase(place);
      counts_of.erase(id);
      ++num_gone;
    }
    ASSERT_EQ(changes.evicted_ids.size(), num_gone);
    std::erase_if(known, [&](std::int64_t id) { return !rows_of.contains(id); });
    ASSERT_EQ(find(table, gone), Ids(gone.size(), -1));
  }
  ASSERT_EQ(table.size(), static_cast<std::int64_t>(rows_of.size()));
  for (const auto& [id, row] : rows_of) {
    ASSERT_EQ(table.id_of(row), id);
    ASSERT_EQ(table.count_of(row), counts_of[id]);
  }
}

/// What an eviction must do, said with maps and sorts.
class Model {
 public:
  explicit Model(const IdTableOptions& options)
      : options_(options), per_bucket_((options.capacity + 1023) / 1024) {}

  struct Seen {
    std::int64_t count = 0;
    std::int64_t last = 0;
  };

  std::set<std::int64_t> step(const Ids& ids, std::int64_t step) {
    Ids fresh;
    std::unordered_map<std::int64_t, std::int64_t> counts;
    for (const std::int64_t id : ids) {
      Bucket& own = known_[bucket_of(id)];
      const auto place = own.find(id);
      if (place != own.end()) {
        ++place->second.count;
        place->second.last = step;
      } else if (counts[id]++ == 0) {
        fresh.push_back(id);
      }
    }
    std::map<int, Ids> arriving;
    for (const std::int64_t id : fresh) arriving[bucket_of(id)].push_back(id);
    std::set<std::int64_t> evicted;
    for (auto& [bucket, arrivals] : arriving) {
      Bucket& own = known_[bucket];
      auto held = static_cast<std::int64_t>(own.size());
      Ids old;
      for (const auto& [id, seen] : own) {
        if (seen.last < step) old.push_back(id);
      }
      const auto over = held + static_cast<std::int64_t>(arrivals.size()) - per_bucket_;
      if (over > 0) {
        std::sort(old.begin(), old.end(), [&](std::int64_t a, std::int64_t b) {
          return std::tuple(score(own[a], step), own[a].last, a) <
                 std::tuple(score(own[b], step), own[b].last, b);
        });
        const auto share = static_cast<std::int64_t>(
            std::ceil(static_cast<double>(per_bucket_) * options_.eviction.share));
        old.resize(std::min<std::size_t>(old.size(), std::max(over, share)));
        for (const std::int64_t id : old) {
          own.erase(id);
          evicted.insert(id);
        }
        held -= static_cast<std::int64_t>(old.size());
        size_ -= static_cast<std::int64_t>(old.size());
      }
      for (const std::int64_t id : arrivals) {
        if (held++ >= per_bucket_) continue;
        own[id] = {counts[id], step};
        ++size_;
      }
    }
    return evicted;
  }

  std::int64_t size() const { return size_; }
  /// Null for an id without a row.
  const Seen* find(std::int64_t id) const {
    const auto bucket = known_.find(bucket_of(id));
    if (bucket == known_.end()) return nullptr;
    const auto place = bucket->second.find(id);
    return place == bucket->second.end() ? nullptr : &place->second;
  }

 private:
  using Bucket = std::map<std::int64_t, Seen>;

  double score(const Seen& seen, std::int64_t step) const {
    if (options_.eviction.kind == EvictionKind::kLfu) return static_cast<double>(seen.count);
    if (options_.eviction.kind == EvictionKind::kLru) return static_cast<double>(seen.last);
    return static_cast<double>(seen.count) /
           std::pow(static_cast<double>(step - seen.last + 1), options_.eviction.decay_exponent);
  }

  IdTableOptions options_;
  std::int64_t per_bucket_;
  std::int64_t size_ = 0;
  std::unordered_map<int, Bucket> known_;
};

/// One batch, in table and model.
void expect_same_step(IdTable& table, Model& model, const Ids& batch, std::int64_t step) {
  const auto got = admit(table, batch, step);
  const auto evicted = model.step(batch, step);
  const Ids& gone = got.changes.evicted_ids;
  ASSERT_EQ(std::set<std::int64_t>(gone.begin(), gone.end()), evicted) << "step " << step;
  ASSERT_EQ(table.size(), model.size());
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const Model::Seen* const known = model.find(batch[i]);
    ASSERT_EQ(got.rows[i] >= 0, known != nullptr);
    if (known == nullptr) continue;
    ASSERT_EQ(table.id_of(got.rows[i]), batch[i]);
    ASSERT_EQ(table.count_of(got.rows[i]), known->count);
  }
}

const Eviction kEvictions[] = {{.kind = EvictionKind::kLfu, .share = 0.1},
                               {.kind = EvictionKind::kLru, .share = 0.1},
                               {.kind = EvictionKind::kDistanceLfu, .share = 0.1},
                               {.kind = EvictionKind::kDistanceLfu, .decay_exponent = 0.5}};

TEST(IdTable, EvictsAsTheModelSays) {
  for (const Eviction& eviction : kEvictions) {
    IdTableOptions options{.name = "t", .capacity = 20 * 1024, .refuse_when_full = true};
    options.eviction = eviction;
    IdTable table(options);
    Model model(options);
    std::mt19937_64 random(3);
    for (std::int64_t step = 0; step < 150; ++step) {
      Ids batch(1 + random() % 60);
      for (std::int64_t& id : batch) {
        const auto number = std::min(random() % 120, random() % 120);
        id = id_in(static_cast<int>(random() % 3), number);
      }
      ASSERT_NO_FATAL_FAILURE(expect_same_step(table, model, batch, step));
    }
    EXPECT_LE(table.num_rows(), 20 * 3);
  }
}

/// All buckets, full nearly always; ids that come back after they went.
TEST(IdTable, EvictsAsTheModelSaysInLongTraffic) {
  for (const Eviction& eviction : kEvictions) {
    for (const std::uint64_t seed : {1, 2}) {
      IdTableOptions options{.name = "t", .capacity = 16 * 1024, .refuse_when_full = true};
      options.eviction = eviction;
      IdTable table(options);
      Model model(options);
      std::mt19937_64 random(seed);
      std::int64_t num_evicted = 0;
      std::int64_t step = 0;
      for (std::int64_t done = 0; done < operations(100'000); ++step) {
        Ids batch(1 + random() % 4000);
        for (std::int64_t& id : batch) {
          const auto number = std::min({random() % 80'000, random() % 80'000, random() % 80'000});
          id = static_cast<std::int64_t>(number * 0x9e3779b97f4a7c15U);
        }
        done += static_cast<std::int64_t>(batch.size());
        const std::int64_t before = table.size();
        ASSERT_NO_FATAL_FAILURE(expect_same_step(table, model, batch, step)) << "seed " << seed;
        num_evicted += table.size() <= before ? 1 : 0;
      }
      EXPECT_GT(num_evicted, step / 4);
      EXPECT_LE(table.num_rows(), 16 * 1024);
    }
  }
}

TEST(IdTable, ForgetsWhatWasNotSeenForTooLong) {
  IdTableOptions options;
  options.eviction = {.kind = EvictionKind::kTimeToLive, .time_to_live = 3, .interval = 2};
  options.protect = {5};
  IdTable table(options);
  admit(table, {5, 6, 7}, 0);
  admit(table, {7}, 2);
  EXPECT_EQ(table.size(), 3);
  EXPECT_EQ(admit(table, {}, 3).changes.evicted_ids, Ids{});
  EXPECT_EQ(admit(table, {8}, 4).rows, Ids{1});  // 6 was last seen 4 steps ago
  EXPECT_EQ(find(table, {5, 6, 7, 8}), (Ids{0, -1, 2, 1}));
  EXPECT_EQ(admit(table, {}, 6).changes.evicted_ids, Ids{7});
}

/// Traffic with gaps, batches that are taken back, ids that are erased or go with their table into
/// another one; beside a map of what was last seen when.
TEST(IdTable, ForgetsAsTheModelSays) {
  for (const std::int64_t time_to_live : {1, 4, 30}) {
    for (const std::int64_t interval : {1, 3}) {
      IdTableOptions options;
      options.eviction = {
          .kind = EvictionKind::kTimeToLive, .time_to_live = time_to_live, .interval = interval};
      options.protect = {11};
      IdTable table(options);
      std::map<std::int64_t, std::int64_t> last_seen;
      std::mt19937_64 random(static_cast<std::uint64_t>(time_to_live * 10 + interval));
      const auto batch = [&] {
        Ids ids(random() % 40);
        for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random() % 300);
        return ids;
      };
      std::int64_t step = 0;
      std::size_t num_gone = 0;
      for (int call = 0; call < 600; ++call) {
        step += random() % 10 == 0 ? static_cast<std::int64_t>(random() % 40) : 1;
        if (random() % 4 == 0) {
          const Ids never = batch();
          Ids rows(never.size());
          table.plan_admit(never, {}, step, rows);
          table.undo_admitted();
        }
        const Ids ids = batch();
        const auto got = admit(table, ids, step);
        for (const std::int64_t id : ids) last_seen[id] = step;
        std::set<std::int64_t> gone;
        for (const auto& [id, last] : last_seen) {
          if (step % interval == 0 && step - last > time_to_live && id != 11) gone.insert(id);
        }
        for (const std::int64_t id : gone) last_seen.erase(id);
        num_gone += gone.size();
        const Ids& evicted = got.changes.evicted_ids;
        ASSERT_EQ(std::set(evicted.begin(), evicted.end()), gone) << "step " << step;
        ASSERT_EQ(evicted.size(), gone.size());
        ASSERT_EQ(table.size(), static_cast<std::int64_t>(last_seen.size()));
        if (random() % 8 == 0) {
          const Ids erased = batch();
          table.erase(erased);
          for (const std::int64_t id : erased) last_seen.erase(id);
        }
        if (random() % 50 == 0) {
          const IdList saved = table.export_ids();
          table = IdTable(options);
          table.load(saved.ids, saved.counts, saved.last_steps);
        }
      }
      EXPECT_GT(num_gone, 100U);
      EXPECT_TRUE(last_seen.contains(11));
    }
  }
}

TEST(RowDeadlines, AStepLooksAtNoMoreRowsThanOneBeforeSaw) {
  constexpr std::int64_t kTimeToLive = 20;
  RowDeadlines deadlines;
  std::vector<std::int64_t> last_seen(1000);
  std::vector<std::size_t> num_seen;  // by step
  std::mt19937_64 random(6);
  std::size_t num_gone = 0;
  for (std::int64_t step = 0; step < 300; ++step) {
    std::set<std::uint32_t> seen;
    for (int i = 0; i < 30; ++i) seen.insert(static_cast<std::uint32_t>(random() % 1000));
    for (const std::uint32_t row : seen) last_seen[row] = step;
    num_seen.push_back(seen.size());
    const std::size_t most = step <= kTimeToLive ? 0 : num_seen[num_seen.size() - 2 - kTimeToLive];
    const auto plan = [&] {
      std::size_t num_looked_at = 0;
      deadlines.plan_due(step, [&](std::uint32_t row) {
        ++num_looked_at;
        const std::int64_t next = last_seen[row] + kTimeToLive + 1;
        if (next > step) return next;
        EXPECT_EQ(next, step);  // not later than it could be known
        ++num_gone;
        return RowDeadlines::kNone;
      });
      for (const std::uint32_t row : seen) deadlines.plan(row, step + kTimeToLive + 1);
      deadlines.reserve();
      EXPECT_LE(num_looked_at, most) << step;
      return num_looked_at;
    };
    if (step % 2 == 1) {  // taken back, and planned once more
      const bool has_due = deadlines.has_due(step);
      const std::size_t before = plan();
      deadlines.undo();
      EXPECT_EQ(deadlines.has_due(step), has_due);
      num_gone = 0;
      EXPECT_EQ(plan(), before);
      EXPECT_TRUE(step <= kTimeToLive || num_gone > 0);
    } else {
      plan();
    }
    deadlines.keep();
    EXPECT_FALSE(deadlines.has_due(step));
  }
  EXPECT_GT(deadlines.bytes(), 300 * 4);
  deadlines.clear();
  EXPECT_EQ(deadlines.bytes(), 0);
}

TEST(IdTable, AdmitsFromTheNthSightingOn) {
  IdTable table({.admission = {.kind = AdmissionKind::kFrequency, .sightings = 3}});
  EXPECT_EQ(admit(table, {9, 9, 10}, 0).rows, (Ids{-1, -1, -1}));
  EXPECT_EQ(admit(table, {10, 9}, 1).rows, (Ids{-1, 0}));
  EXPECT_EQ(admit(table, {10}, 2).rows, Ids{1});
  // Sightings survive a checkpoint.
  IdTable other({.admission = {.kind = AdmissionKind::kFrequency, .sightings = 3}});
  admit(table, {11, 11}, 3);
  other.load_sketch(table.export_sketch());
  EXPECT_EQ(admit(other, {11}, 4).rows, Ids{0});
}

TEST(IdTable, TheSketchForgetsHalfAtTimes) {
  IdTable table({.admission = {.kind = AdmissionKind::kFrequency, .sightings = 100}});
  const std::int64_t id = id_in(0, 1);
  admit(table, {id}, 0, {60});
  // 2^14 sightings in the bucket, of ids of their own.
  for (int i = 0; i < (1 << 14) / 40; ++i) {
    admit(table, {id_in(0, 1000 + static_cast<unsigned>(i))}, 1, {40});
  }
  EXPECT_EQ(admit(table, {id}, 2, {40}).rows, Ids{-1});  // 30 + 40
}

/// A count far above what a loop could halve its way through.
TEST(IdTable, TheSketchTakesCountsOfAnySize) {
  for (const std::int64_t count : {std::int64_t{1} << 14, std::int64_t{5} << 14,
                                   (std::int64_t{1} << 40) + 77, kHigh - 1, kHigh}) {
    FrequencySketch sketch;
    EXPECT_EQ(sketch.add(id_hash(id_in(0, 1)), 16), 16);
    sketch.keep();
    EXPECT_EQ(sketch.add(id_hash(id_in(0, 2)), count), 255) << count;
    const std::int64_t rest = static_cast<std::int64_t>(
        (std::uint64_t{16} + static_cast<std::uint64_t>(count)) % (std::uint64_t{1} << 14));
    EXPECT_EQ(sketch.export_state().sightings, Ids{rest}) << count;
    // 255 and 16, halved once for every 2^14 sightings.
    const auto counters = sketch.export_state().counters;
    const std::int64_t halvings = std::min<std::int64_t>(8, count >> 14);
    EXPECT_EQ(*std::max_element(counters.begin(), counters.end()), 255 >> halvings) << count;
    EXPECT_GT(std::count(counters.begin(), counters.end(), 16 >> halvings), 0) << count;
    sketch.undo();
    EXPECT_EQ(sketch.add(id_hash(id_in(0, 1)), 1), 17) << count;
  }
}

/// Counts of one id are summed over a batch.
TEST(IdTable, SumsOfCountsStopAtTheirLargestValue) {
  for (const AdmissionKind kind :
       {AdmissionKind::kAlways, AdmissionKind::kFrequency, AdmissionKind::kProbability}) {
    IdTable table({.admission = {.kind = kind, .sightings = 200}});
    EXPECT_EQ(admit(table, {7, 8, 7, 7}, 0, {kHigh, 1, kHigh, 3}).rows[0], 0);
    EXPECT_EQ(table.count_of(0), 0xffffffff);
    admit(table, {7, 7}, 1, {kHigh, kHigh});
    EXPECT_EQ(table.count_of(0), 0xffffffff);
  }
}

TEST(IdTable, AdmitsByChanceTheSameWayEveryTime) {
  const Admission admission = {.kind = AdmissionKind::kProbability, .probability = 0.1, .seed = 4};
  Ids ids(20000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  IdTable one({.admission = admission});
  IdTable two({.admission = admission});
  EXPECT_EQ(admit(one, ids, 3).rows, admit(two, ids, 3).rows);
  EXPECT_NEAR(static_cast<double>(one.size()), 2000, 200);  // 4.7 deviations
  IdTable three({.admission = admission});
  EXPECT_NE(admit(three, ids, 4).rows, find(one, ids));
  // Seen twice: 1 - 0.9^2.
  IdTable four({.admission = admission});
  admit(four, ids, 3, Ids(ids.size(), 2));
  EXPECT_NEAR(static_cast<double>(four.size()), 3800, 260);
}

/// All that can be seen of a table.
std::tuple<Ids, Ids, Ids, Ids, std::vector<std::uint8_t>> state_of(const IdTable& table) {
  const IdList list = table.export_ids();
  return {list.ids, list.rows, list.counts, list.last_steps, table.export_sketch().counters};
}

TEST(IdTable, AFullTableChangesNothing) {
  IdTable table({.name = "user", .capacity = 2 * 1024});
  admit(table, {id_in(5, 0), id_in(5, 1), id_in(6, 0)}, 0);
  const auto before = state_of(table);
  try {
    admit(table, {id_in(6, 1), id_in(5, 0), id_in(5, 2)}, 1);
    FAIL() << "no error";
  } catch (const IdTableFull& error) {
    EXPECT_EQ(error.table, "user");
    EXPECT_EQ(error.capacity, 2048);
    EXPECT_EQ(error.bucket, 5);
    EXPECT_EQ(std::string(error.what()),
              "id table 'user': no room for id " + std::to_string(id_in(5, 2)) +
                  ": bucket 5 has all its 2 rows of a capacity of 2048, and nothing is evicted. "
                  "Raise the capacity, choose an eviction, or let ids be refused.");
  }
  EXPECT_EQ(state_of(table), before);
  EXPECT_EQ(find(table, {id_in(6, 1)}), Ids{-1});
  IdTable lenient({.capacity = 2 * 1024, .refuse_when_full = true});
  admit(lenient, {id_in(5, 0), id_in(5, 1)}, 0);
  const auto got = admit(lenient, {id_in(5, 2), id_in(5, 1), id_in(7, 0)}, 1);
  EXPECT_EQ(got.rows, (Ids{-1, 1, 2}));
  EXPECT_EQ(got.changes.num_refused, 1);
}

TEST(IdTable, WithoutMemoryTheBatchIsTakenBack) {
  IdTableOptions options{.name = "user",
                         .capacity = std::int64_t{1} << 20,
                         .admission = {.kind = AdmissionKind::kFrequency, .sightings = 2},
                         .eviction = {.kind = EvictionKind::kLfu},
                         .most_bytes = 5 << 16};
  IdTable table(options);
  std::mt19937_64 random(5);
  bool has_failed = false;
  for (std::int64_t step = 0; step < 100 && !has_failed; ++step) {
    Ids batch(1000);
    for (std::int64_t& id : batch) id = static_cast<std::int64_t>(random());
    for (int i = 0; i < 100 && step > 0; ++i) {
      batch.push_back(table.id_of(static_cast<std::int64_t>(random()) & 511));
    }
    const Ids counts(batch.size(), 2);
    const auto before = state_of(table);
    const auto size = table.size();
    try {
      admit(table, batch, step, counts);
    } catch (const IdMemoryError& error) {
      has_failed = true;
      EXPECT_NE(std::string(error.what()).find(std::to_string(size) + " ids are held"),
                std::string::npos)
          << error.what();
      EXPECT_EQ(state_of(table), before);
      EXPECT_EQ(table.size(), size);
      for (std::size_t i = 0; i < 1000; ++i) ASSERT_EQ(find(table, {batch[i]}), Ids{-1});
      // It goes on with what fits.
      EXPECT_EQ(admit(table, {table.id_of(0)}, step).rows, Ids{0});
    }
  }
  EXPECT_TRUE(has_failed);
}

TEST(IdTable, IdsMadeToBeAlikeAreAnErrorNotALoop) {
  IdTable table;
  Ids alike;
  for (std::uint64_t i = 0; i < 60; ++i) alike.push_back(id_at(0x123456789a, i, 77));
  const auto before = state_of(table);
  EXPECT_THROW(admit(table, alike, 0), IdTableError);
  EXPECT_EQ(state_of(table), before);
  EXPECT_LT(table.num_segments(), 64);
  // 45 of them fit: nine lines of five.
  alike.resize(45);
  EXPECT_EQ(admit(table, alike, 0).rows.back(), 44);
  EXPECT_EQ(find(table, alike).back(), 44);
}

TEST(IdTable, AllIdsOfOneSegmentSplitIt) {
  IdTable table;
  Ids ids;
  std::mt19937_64 random(2);
  for (int i = 0; i < 20000; ++i) {
    // Eight bits that choose the segment are alike.
    ids.push_back(id_at(std::uint64_t{0x5a} << 36 | (random() & ((std::uint64_t{1} << 36) - 1)),
                        random() % 1024, random() % 1024));
  }
  admit(table, ids, 0);
  const Ids rows = find(table, ids);
  for (std::size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(table.id_of(rows[i]), ids[i]);
}

TEST(IdTable, MemoryStaysWithinItsPromise) {
  IdTable table;
  std::mt19937_64 random(8);
  for (std::int64_t step = 0; step < 40; ++step) {
    Ids batch(10000);
    for (std::int64_t& id : batch) id = static_cast<std::int64_t>(random());
    admit(table, batch, step);
    if (table.size() < 50000) continue;
    EXPECT_LE(table.bytes(), table.size() * (35 + 16)) << table.size();
  }
}

TEST(IdTable, ALoadedTableGoesOnAsTheSavedOne) {
  IdTableOptions options{.capacity = 4 * 1024, .refuse_when_full = true};
  options.eviction = {.kind = EvictionKind::kDistanceLfu};
  IdTable table(options);
  std::mt19937_64 random(11);
  const auto batch = [&] {
    Ids ids(50);
    for (std::int64_t& id : ids) id = id_in(static_cast<int>(random() % 4), random() % 40);
    return ids;
  };
  for (std::int64_t step = 0; step < 20; ++step) admit(table, batch(), step);
  const IdList saved = table.export_ids();
  IdTable other(options);
  other.load(saved.ids, saved.counts, saved.last_steps);
  for (std::int64_t step = 20; step < 60; ++step) {
    const Ids ids = batch();
    const auto a = admit(table, ids, step);
    const auto b = admit(other, ids, step);
    ASSERT_EQ(a.changes.new_ids, b.changes.new_ids);
    ASSERT_EQ(std::set(a.changes.evicted_ids.begin(), a.changes.evicted_ids.end()),
              std::set(b.changes.evicted_ids.begin(), b.changes.evicted_ids.end()));
  }
}

void expect_parts_decide_as_the_whole(const Eviction& eviction) {
  IdTableOptions options{.capacity = 4 * 1024, .refuse_when_full = true};
  options.eviction = eviction;
  options.admission = {.kind = AdmissionKind::kProbability, .probability = 0.5};
  IdTable whole(options);
  std::vector<IdTable> parts;
  const int cuts[] = {0, 300, 700, 1024};
  for (int part = 0; part < 3; ++part) {
    IdTableOptions cut = options;
    cut.first_bucket = cuts[part];
    cut.end_bucket = cuts[part + 1];
    parts.emplace_back(cut);
  }
  std::mt19937_64 random(12);
  for (std::int64_t step = 0; step < 60; ++step) {
    Ids ids(400);
    for (std::int64_t& id : ids) id = id_in(static_cast<int>(random() % 20) * 53, random() % 12);
    admit(whole, ids, step);
    for (int part = 0; part < 3; ++part) {
      Ids own;
      for (const std::int64_t id : ids) {
        if (cuts[part] <= bucket_of(id) && bucket_of(id) < cuts[part + 1]) own.push_back(id);
      }
      admit(parts[static_cast<std::size_t>(part)], own, step);
    }
  }
  const auto sorted = [](const IdList& list) {
    std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> all;
    for (std::size_t i = 0; i < list.ids.size(); ++i) {
      all[list.ids[i]] = {list.counts[i], list.last_steps[i]};
    }
    return all;
  };
  auto together = sorted(parts[0].export_ids());
  together.merge(sorted(parts[1].export_ids()));
  together.merge(sorted(parts[2].export_ids()));
  EXPECT_EQ(together, sorted(whole.export_ids()));
  EXPECT_THROW(admit(parts[0], {id_in(500, 0)}, 60), std::invalid_argument);
}

TEST(IdTable, PartsDecideAsTheWhole) {
  expect_parts_decide_as_the_whole({.kind = EvictionKind::kLfu});
  expect_parts_decide_as_the_whole(
      {.kind = EvictionKind::kTimeToLive, .time_to_live = 2, .interval = 3});
}

TEST(IdTable, MoreRowsThanANumberHoldsAreAnError) {
  IdTable::State state({.name = "user"});
  try {
    state.reserve_rows(std::int64_t{1} << 32);
    FAIL() << "no error";
  } catch (const TooManyRows& error) {
    EXPECT_STREQ(
        error.what(),
        "id table 'user': more than 4294967295 rows on one rank. Split the table over more "
        "ranks.");
  }
  EXPECT_EQ(state.num_rows, 0);
  state.reserve_rows(1000);  // it goes on
}

TEST(IdTable, RefusesListsThatNoTableWrote) {
  IdTable table({.name = "user", .first_bucket = 3, .end_bucket = 5});
  const std::int64_t a = id_in(3, 0);
  const std::int64_t b = id_in(4, 0);
  try {
    table.load(Ids{a, b, a}, Ids{1, 1, 1}, Ids{0, 0, 0});
    FAIL() << "no error";
  } catch (const IdListError& error) {
    EXPECT_EQ(std::string(error.what()), "id table 'user': rows 0 and 2 both have id " +
                                             std::to_string(a) +
                                             ". The list is damaged, or not of this table.");
  }
  EXPECT_EQ(table.size(), 0);
  EXPECT_THROW(table.load(Ids{id_in(5, 0)}, Ids{1}, Ids{0}), IdListError);
  EXPECT_THROW(table.load(Ids{a}, Ids{0}, Ids{0}), IdListError);
  EXPECT_THROW(table.load(Ids{a}, Ids{}, Ids{}), std::invalid_argument);
  table.load(Ids{a, b}, Ids{1, 2}, Ids{3, 4});
  EXPECT_EQ(table.count_of(1), 2);
  EXPECT_THROW(table.load(Ids{a}, Ids{1}, Ids{0}), std::invalid_argument);
  IdSketch sketch{.buckets = {3}, .counters = {1}, .sightings = {1}};
  EXPECT_THROW(table.load_sketch(sketch), IdListError);
  sketch.counters.resize(FrequencySketch::kCounters);
  table.load_sketch(sketch);
  for (const std::int64_t sightings : {std::int64_t{-1}, std::int64_t{1} << 14, kHigh}) {
    sketch.sightings = {sightings};
    try {
      table.load_sketch(sketch);
      FAIL() << "no error";
    } catch (const IdListError& error) {
      EXPECT_EQ(std::string(error.what()), "id table 'user': the sketch has " +
                                               std::to_string(sightings) +
                                               " sightings in bucket 3; it halves its counts "
                                               "before there are 16384.");
    }
  }
}

TEST(IdTable, OptionsThatCannotBeAreErrors) {
  EXPECT_THROW(IdTable({.capacity = -1}), std::invalid_argument);
  EXPECT_THROW(IdTable({.admission = {.kind = AdmissionKind::kFrequency, .sightings = 256}}),
               std::invalid_argument);
  EXPECT_THROW(IdTable({.admission = {.kind = AdmissionKind::kProbability, .probability = 0}}),
               std::invalid_argument);
  EXPECT_THROW(IdTable({.eviction = {.kind = EvictionKind::kTimeToLive}}), std::invalid_argument);
  EXPECT_THROW(IdTable({.first_bucket = 3, .end_bucket = 2}), std::invalid_argument);
  // What would have no effect.
  const auto text_of = [](const Eviction& eviction, std::int64_t capacity = 1024) -> std::string {
    try {
      const IdTable made({.name = "user", .capacity = capacity, .eviction = eviction});
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  for (const auto kind :
       {EvictionKind::kNone, EvictionKind::kLfu, EvictionKind::kLru, EvictionKind::kDistanceLfu}) {
    EXPECT_EQ(text_of({.kind = kind, .interval = 4}),
              "id table 'user': an eviction interval of 4 is for a time to live alone; others "
              "evict when a bucket is full. Leave it out.");
    const std::string told = text_of({.kind = kind, .decay_exponent = 2});
    EXPECT_EQ(told, kind == EvictionKind::kDistanceLfu
                        ? ""
                        : "id table 'user': a decay exponent of 2.000000 is for distance-lfu "
                          "alone; others do not weigh distances. Leave it out.");
  }
  EXPECT_EQ(text_of({.kind = EvictionKind::kTimeToLive, .time_to_live = 3, .interval = 4}), "");
  for (const auto kind : {EvictionKind::kLfu, EvictionKind::kLru, EvictionKind::kDistanceLfu}) {
    EXPECT_EQ(text_of({.kind = kind}), "");
    EXPECT_EQ(
        text_of({.kind = kind}, 0),
        "id table 'user': lfu, lru and distance-lfu evict when a bucket is full, and without a "
        "capacity none ever is. Give a capacity, a time to live, or no eviction.");
  }
  EXPECT_EQ(text_of({}, 0), "");
  EXPECT_EQ(text_of({.kind = EvictionKind::kTimeToLive, .time_to_live = 3}, 0), "");
  IdTable table;
  EXPECT_THROW(admit(table, {1}, 0, {0}), std::invalid_argument);
  EXPECT_THROW(admit(table, {1}, -1), std::invalid_argument);
  EXPECT_THROW(admit(table, {1}, std::int64_t{1} << 32), std::invalid_argument);
  admit(table, {1}, 5);
  EXPECT_THROW(admit(table, {1}, 4), std::invalid_argument);
}

TEST(RowInit, DependsOnSeedAndIdAlone) {
  // Philox 4x32-10 of counter 0 and key 0, and of all bits set, as the paper's code has them.
  std::vector<float> values(4);
  init_rows(Ids{0}, 0, 4, 0, 1, values);
  const std::uint32_t known[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(values[i], static_cast<float>(known[i] >> 8) * 0x1p-24F);
  }
  std::vector<float> three(15);
  std::vector<float> one(5);
  init_rows(Ids{7, -1, kLow}, 9, 5, -0.5F, 0.25F, three);
  init_rows(Ids{-1}, 9, 5, -0.5F, 0.25F, one);
  EXPECT_TRUE(std::equal(one.begin(), one.end(), three.begin() + 5));
  for (const float value : three) EXPECT_TRUE(-0.5F <= value && value < 0.25F);
  std::vector<float> other(5);
  init_rows(Ids{-1}, 10, 5, -0.5F, 0.25F, other);
  EXPECT_NE(one, other);
  EXPECT_THROW(init_rows(Ids{1}, 0, 3, 0, 1, one), std::invalid_argument);
}

TEST(RowInit, EveryLevelAgreesWithThePlainLoops) {
  std::mt19937_64 random(4);
  Ids ids(100);
  for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random());
  for (const std::int64_t columns : {1, 2, 3, 4, 5, 8, 31, 32, 33, 64, 130}) {
    for (const std::size_t count : {0, 1, 2, 3, 7, 100}) {
      const auto draw = [&](const kernels::RowInitKernels& kernels) {
        std::vector<float> values(count * static_cast<std::size_t>(columns) + 1, 7.0F);
        kernels.init_rows(ids.data(), static_cast<std::int64_t>(count), 0x9e3779b97f4a7c15U,
                          columns, -0.3F, 0.21F, values.data());
        return values;
      };
      const auto wanted = draw(kernels::row_init_reference());
      EXPECT_EQ(wanted.back(), 7.0F);
      for (const kernels::Isa isa : kernels::supported_isas()) {
        EXPECT_EQ(draw(*kernels::row_init_kernels(isa)), wanted)
            << kernels::name_of(isa) << ' ' << columns << ' ' << count;
      }
    }
  }
}

TEST(IdLines, EveryLevelAgreesWithThePlainLoops) {
  LineStore store(0);
  std::mt19937_64 random(9);
  Ids ids;
  for (std::uint32_t row = 0; row < 60000; ++row) {
    const auto id = static_cast<std::int64_t>(random());
    ASSERT_EQ(store.insert(id, row), Placed::kYes);
    ids.push_back(id);
    if (random() % 2 == 0) ids.push_back(static_cast<std::int64_t>(random()));
  }
  for (std::size_t i = 0; i < ids.size(); i += 7) {
    if (store.find(ids[i]) >= 0) store.erase(ids[i]);
  }
  ids.push_back(0);  // the key of free slots that were never used
  for (const std::int64_t count : {0, 1, 31, 32, 33, 64, 65, 1000, static_cast<int>(ids.size())}) {
    Ids wanted(static_cast<std::size_t>(count));
    std::vector<kernels::RowRecord> records(60000, {1, 5, 0});
    std::vector<kernels::TouchedRecord> before(ids.size());
    const Ids counts(ids.size(), 3);
    kernels::id_line_reference().touch_rows(store.view(), records.data(), ids.data(), counts.data(),
                                            count, 9, wanted.data(), before.data());
    for (const kernels::Isa isa : kernels::supported_isas()) {
      Ids found(wanted.size());
      kernels::id_line_kernels(isa)->find_rows(store.view(), ids.data(), count, found.data());
      EXPECT_EQ(found, wanted) << kernels::name_of(isa) << ' ' << count;
      std::vector<kernels::RowRecord> touched(60000, {1, 5, 0});
      std::vector<kernels::TouchedRecord> old(ids.size());
      kernels::id_line_kernels(isa)->touch_rows(store.view(), touched.data(), ids.data(),
                                                counts.data(), count, 9, found.data(), old.data());
      EXPECT_EQ(found, wanted);
      for (std::size_t i = 0; i < records.size(); ++i) {
        ASSERT_EQ(touched[i].count, records[i].count);
        ASSERT_EQ(touched[i].last_step, records[i].last_step);
      }
      for (std::size_t i = 0; i < old.size(); ++i) ASSERT_EQ(old[i].count, before[i].count);
    }
  }
}

}  // namespace
}  // namespace tessera::collision
