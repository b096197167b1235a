#include "core/cores.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace tessera::core {
namespace {

int lowest(const cpu_set_t& set) {
  int core = 0;
  while (CPU_ISSET(core, &set) == 0) ++core;
  return core;
}

TEST(Cores, AreThoseOfTheMaskOfThisThread) {
  cpu_set_t all;
  CPU_ZERO(&all);
  ASSERT_EQ(::sched_getaffinity(0, sizeof(all), &all), 0);
  EXPECT_EQ(cores_in_mask(), CPU_COUNT(&all));
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(lowest(all), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(cores_in_mask(), 1);
    EXPECT_EQ(cores_left(), 1);
  }).join();
}

TEST(Cores, AreNoMoreThanTheControlGroupGives) {
  const int in_mask = cores_in_mask();
  const double of_group = cores_of_control_group().value_or(in_mask);
  EXPECT_EQ(cores_left(), std::max(1, std::min(in_mask, static_cast<int>(of_group))));
}

TEST(Cores, AreSharedWithThoseWhoMayUseThem) {
  const std::vector<int> low = {0, 1, 2, 3};
  const std::vector<int> high = {4, 5, 6, 7, 8};
  EXPECT_EQ(share_of_cores({low}, 0, {}), 4);
  EXPECT_EQ(share_of_cores({low, low}, 1, {}), 2);
  // Ranks that a scheduler has bound to cores of their own share none.
  EXPECT_EQ(share_of_cores({low, high}, 0, {}), 4);
  EXPECT_EQ(share_of_cores({low, high}, 1, {}), 5);
  EXPECT_EQ(share_of_cores({low, high, {3, 4}}, 0, {}), 2);
  EXPECT_EQ(share_of_cores({low, high}, 1, 4.0), 2);
  EXPECT_EQ(share_of_cores({low, low, low, low, low}, 2, {}), 1);
  EXPECT_EQ(share_of_cores({low}, 0, 0.5), 1);
}

TEST(ControlGroups, EndWithTheRoot) {
  EXPECT_TRUE(control_groups("no such controller").empty() ||
              control_groups("no such controller").back() == "/sys/fs/cgroup");
  for (const auto& folder : control_groups("cpu")) {
    EXPECT_TRUE(folder.string().starts_with("/sys/fs/cgroup")) << folder;
  }
}

}  // namespace
}  // namespace tessera::core
