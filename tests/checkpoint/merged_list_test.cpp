// Lists of ids that deltas change: what comes from where, and what no delta can be.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "checkpoint/merged_list.h"
#include "tessera/checkpoint/error.h"

namespace tessera::checkpoint::testing {
namespace {

using Ids = std::vector<std::int64_t>;

/// The merged ids, each from where the stretches say.
Ids merged_ids(const ListNumbers& numbers, const MergedList& merged, std::int64_t begin,
               std::int64_t end) {
  Ids ids;
  for (const auto& stretch : merged.stretches(begin, end)) {
    EXPECT_EQ(stretch.first, begin + static_cast<std::int64_t>(ids.size()));
    const Ids& source = stretch.is_changed ? numbers.changed : numbers.base;
    for (std::int64_t i = 0; i < stretch.count; ++i) {
      ids.push_back(source.at(static_cast<std::size_t>(stretch.source + i)));
    }
  }
  return ids;
}

std::string error_of(const ListNumbers& numbers) {
  try {
    const MergedList merged(numbers, "here");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCorrupt);
    return error.what();
  }
  return "";
}

TEST(MergedList, RemovedGoChangedStayNewFollow) {
  // Two groups: 10 11 12 | 20 21. 11 goes, 12 changes, 13 is new; 21 goes and comes again; 99 came
  // and went without the base's knowledge.
  const ListNumbers numbers{.base = {10, 11, 12, 20, 21},
                            .base_groups = {3, 2},
                            .groups = {3, 2},
                            .changed = {13, 12, 21},
                            .runs = {2, 1},
                            .removed = {11, 21, 99}};
  const MergedList merged(numbers, "here");
  EXPECT_EQ(merged.num_rows(), 5);
  EXPECT_EQ(merged_ids(numbers, merged, 0, 5), (Ids{10, 12, 13, 20, 21}));
  const auto all = merged.stretches(0, 5);
  EXPECT_FALSE(all.front().is_changed);
  EXPECT_TRUE(all.back().is_changed);
}

TEST(MergedList, AgreesWithASetUnderRandomChanges) {
  std::mt19937_64 random(3);
  constexpr std::int64_t kGroups = 8;
  for (int round = 0; round < 50; ++round) {
    ListNumbers numbers;
    std::set<std::int64_t> changed;
    std::set<std::int64_t> removed;
    for (std::int64_t group = 0; group < kGroups; ++group) {
      Ids here;
      for (std::int64_t id = group * 100; id < group * 100 + 40; ++id) {
        if (random() % 2 == 0) here.push_back(id);
      }
      std::shuffle(here.begin(), here.end(), random);
      numbers.base.insert(numbers.base.end(), here.begin(), here.end());
      numbers.base_groups.push_back(static_cast<std::int64_t>(here.size()));
      std::set<std::int64_t> after(here.begin(), here.end());
      for (const std::int64_t id : here) {
        if (random() % 5 == 0) removed.insert(id), after.erase(id);
      }
      std::int64_t run = 0;
      for (std::int64_t id = group * 100; id < group * 100 + 60; ++id) {
        if (random() % 4 != 0) continue;
        numbers.changed.push_back(id);
        changed.insert(id);
        after.insert(id);
        ++run;
      }
      numbers.runs.push_back(run);
      numbers.groups.push_back(static_cast<std::int64_t>(after.size()));
    }
    numbers.removed.assign(removed.begin(), removed.end());
    const MergedList merged(numbers, "here");
    const Ids whole = merged_ids(numbers, merged, 0, merged.num_rows());
    std::size_t at = 0;
    for (std::size_t group = 0; group < kGroups; ++group) {
      std::set<std::int64_t> here;
      for (std::int64_t i = 0; i < numbers.groups[group]; ++i, ++at) {
        EXPECT_EQ(whole[at] / 100, static_cast<std::int64_t>(group));
        EXPECT_TRUE(here.insert(whole[at]).second) << whole[at];
      }
    }
    for (const auto& stretch : merged.stretches(0, merged.num_rows())) {
      for (std::int64_t i = 0; i < stretch.count; ++i) {
        const auto id = whole[static_cast<std::size_t>(stretch.first + i)];
        EXPECT_EQ(stretch.is_changed, changed.contains(id)) << id;
      }
    }
    for (int part = 0; part < 20; ++part) {
      const auto begin =
          static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(merged.num_rows()));
      const auto end = begin + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(
                                                                        merged.num_rows() - begin));
      EXPECT_EQ(merged_ids(numbers, merged, begin, end),
                Ids(whole.begin() + begin, whole.begin() + end));
    }
  }
}

TEST(MergedList, WhatNoDeltaIsIsRefused) {
  const ListNumbers good{.base = {1, 2},
                         .base_groups = {1, 1},
                         .groups = {1, 2},
                         .changed = {3},
                         .runs = {0, 1},
                         .removed = {}};
  EXPECT_EQ(error_of(good), "");
  ListNumbers bad = good;
  bad.changed = {3, 3};
  bad.runs = {0, 2};
  EXPECT_NE(error_of(bad).find("has id 3 twice, in changed rows 0 and 1"), std::string::npos);
  bad = good;
  bad.groups = {1, 3};
  EXPECT_NE(error_of(bad).find("group 1 is to have 3 ids, and has 2"), std::string::npos);
  bad = good;
  bad.base_groups = {1, 2};
  EXPECT_NE(error_of(bad).find("its groups overlap, or leave ids out"), std::string::npos);
  bad = good;
  bad.runs = {-1, 2};
  EXPECT_NE(error_of(bad).find("its groups overlap, or leave ids out"), std::string::npos);
  bad = good;
  bad.groups = {1};
  EXPECT_NE(error_of(bad).find("its groups overlap, or leave ids out"), std::string::npos);
}

}  // namespace
}  // namespace tessera::checkpoint::testing
