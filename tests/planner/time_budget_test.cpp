// What `tessera doctor --profile` measures ends in time, however slow the machine is. The clock is
// the test's own.

#include <gtest/gtest.h>

#include "worker/time_budget.h"

namespace tessera::cli {
namespace {

struct Found {
  double end = 0;
  int measured = 0;
  int calls = 0;
  int most_times = 0;
};

// Measures `count` things of which each takes `setup` seconds and `single` a call.
template <class Seconds>
Found run(TimeBudget& budget, int count, double setup, Seconds single) {
  Found found;
  for (int i = 0; i < count; ++i) {
    if (!budget.begins(found.end)) continue;
    ++found.measured;
    found.end += setup + 2 * single(i);
    const Repetitions often = budget.repetitions(found.end, single(i), 0.2);
    found.end += often.times * often.calls * single(i);
    found.calls += often.times * often.calls;
    found.most_times = std::max(found.most_times, often.times);
  }
  return found;
}

TEST(TimeBudgetTest, AnIdleMachineMeasuresEverythingFiveTimes) {
  TimeBudget budget(17, 40);
  const Found found = run(budget, 40, 0.1, [](int) { return 1e-3; });
  EXPECT_EQ(found.measured, 40);
  EXPECT_EQ(found.most_times, 5);
  EXPECT_EQ(found.calls, 40 * 200);
  EXPECT_LT(found.end, 40 * (0.1 + 0.2 + 0.01));
  EXPECT_EQ(budget.left_out(), 0);
}

TEST(TimeBudgetTest, ASlowOneRepeatsLessAndStillMeasuresAll) {
  TimeBudget budget(17, 40);
  const Found found = run(budget, 40, 0.1, [](int) { return 0.1; });
  EXPECT_EQ(found.measured, 40);
  EXPECT_LT(found.calls, 40 * 5);
  EXPECT_LE(found.end, 17);
}

TEST(TimeBudgetTest, AVerySlowOneLeavesOutWhatWouldEndTooLate) {
  for (const double single : {0.3, 1.0, 5.0}) {
    TimeBudget budget(17, 40);
    const Found found = run(budget, 40, single, [&](int) { return single; });
    EXPECT_LE(found.end, 17) << single;
    EXPECT_EQ(found.measured + budget.left_out(), 40) << single;
    EXPECT_GT(budget.left_out(), 0) << single;
    EXPECT_GT(found.measured, 0) << single;
  }
}

// Only what could not be foreseen may be late: one thing.
TEST(TimeBudgetTest, AMachineThatBecomesSlowIsLateByOneThing) {
  for (const int slow_from : {5, 20, 35}) {
    TimeBudget budget(17, 40);
    const auto single = [&](int i) { return i < slow_from ? 0.02 : 0.9; };
    const Found found = run(budget, 40, 0.1, single);
    EXPECT_LE(found.end, 17 + 0.1 + 2 * 0.9) << slow_from;
    EXPECT_GE(found.measured, slow_from);
  }
}

TEST(TimeBudgetTest, NoTimeIsNothingMeasured) {
  TimeBudget budget(-3, 2);
  EXPECT_FALSE(budget.begins(0));
  EXPECT_FALSE(budget.begins(0));
  EXPECT_EQ(budget.left_out(), 2);
  EXPECT_EQ(budget.repetitions(0, 1, 1).times, 0);
}

}  // namespace
}  // namespace tessera::cli
