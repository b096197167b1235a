// An allocation that fails, whichever of a batch it is, leaves the table as it was.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <random>
#include <tuple>
#include <vector>

#include "tessera/collision/id_table.h"

namespace {

// Allocations of this thread until one fails; negative: none does.
thread_local std::int64_t until_failure = -1;

void* allocate(std::size_t size) {
  if (until_failure == 0) {
    until_failure = -1;
    throw std::bad_alloc();
  }
  if (until_failure > 0) --until_failure;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace tessera::collision {
namespace {

using Ids = std::vector<std::int64_t>;

auto state_of(const IdTable& table) {
  const IdList list = table.export_ids();
  const IdSketch sketch = table.export_sketch();
  return std::tuple(list.ids, list.rows, list.counts, list.last_steps, sketch.buckets,
                    sketch.counters, sketch.sightings, table.bucket_sizes(), table.num_rows(),
                    table.size());
}

Ids find(const IdTable& table, const Ids& ids) {
  Ids rows(ids.size());
  table.find(ids, rows);
  return rows;
}

/// Admits the batch with the first allocation failing, then the second, until none is left to fail.
/// Returns how many failed.
int admit_in_spite(IdTable& table, const Ids& ids, std::int64_t step, Ids& rows) {
  for (int number = 0;; ++number) {
    const auto before = state_of(table);
    until_failure = number;
    try {
      table.admit(ids, {}, step, rows);
      until_failure = -1;
      return number;
    } catch (const std::bad_alloc&) {
    } catch (const IdMemoryError&) {
    }
    EXPECT_EQ(until_failure, -1);
    until_failure = -1;
    EXPECT_EQ(state_of(table), before) << "allocation " << number << " of step " << step;
  }
}

/// `num_ids` new and known ids in every step, beside a table of which no allocation fails.
void expect_nothing_changes(const IdTableOptions& options, std::int64_t num_steps,
                            std::size_t num_ids) {
  IdTable table(options);
  IdTable other(options);
  other.find({}, {});  // the process chooses its instruction set once
  std::mt19937_64 random(3);
  int num_failed = 0;
  for (std::int64_t step = 0; step < num_steps; ++step) {
    Ids ids(num_ids);
    for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random() % 100'000);
    for (std::size_t i = 0; i < std::min<std::size_t>(num_ids, 100); ++i) {
      const std::int64_t again = ids[i];
      ids.push_back(again);
    }
    Ids rows(ids.size());
    Ids wanted(ids.size());
    num_failed += admit_in_spite(table, ids, step, rows);
    other.admit(ids, {}, step, wanted);
    ASSERT_EQ(rows, wanted) << step;
    ASSERT_EQ(state_of(table), state_of(other)) << step;
    ASSERT_EQ(find(table, ids), find(other, ids)) << step;
  }
  EXPECT_GT(num_failed, 30);
}

// Segments split and the directory doubles.
TEST(IdAllocations, OneThatFailsChangesNothingInATableThatGrows) {
  expect_nothing_changes({}, 12, 6000);
}

TEST(IdAllocations, OneThatFailsChangesNothingInATableThatEvicts) {
  expect_nothing_changes({.capacity = kNumBuckets,
                          .admission = {.kind = AdmissionKind::kFrequency, .sightings = 2},
                          .eviction = {.kind = EvictionKind::kLfu},
                          .refuse_when_full = true},
                         4, 40);
}

TEST(IdAllocations, OneThatFailsChangesNothingInATableThatForgets) {
  expect_nothing_changes({.eviction = {.kind = EvictionKind::kTimeToLive, .time_to_live = 1}}, 8,
                         40);
}

}  // namespace
}  // namespace tessera::collision
