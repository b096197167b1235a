#include "core/cores.h"

#include <sched.h>

#include <algorithm>
#include <thread>

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

TEST(ControlGroups, EndWithTheRoot) {
  EXPECT_TRUE(control_groups("no such controller").empty() ||
              control_groups("no such controller").back() == "/sys/fs/cgroup");
  for (const auto& folder : control_groups("cpu")) {
    EXPECT_TRUE(folder.string().starts_with("/sys/fs/cgroup")) << folder;
  }
}

}  // namespace
}  // namespace tessera::core
