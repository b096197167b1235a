// Certified gaps on public models: what was reached once may only get better.

#include <gtest/gtest.h>

#include "planner/public_models.h"
#include "tessera/planner/planner.h"

namespace tessera::planner {
namespace {

struct Reached {
  const char* model;
  double percent[8];  // on 8, 16, 64 and 128 ranks, each with speeds of a CPU and of a GPU
};

constexpr Reached kReached[] = {
    {"colossal", {0.01, 0.02, 0.02, 0.03, 0.06, 0.05, 0.15, 0.07}},
    {"jumbo", {0.02, 0.05, 0.04, 0.03, 0.29, 0.17, 0.69, 0.16}},
    {"large", {0.04, 0.04, 0.03, 0.07, 0.58, 0.41, 0.44, 0.69}},
    {"medium", {0.05, 0.07, 0.12, 0.14, 0.30, 1.38, 0.80, 1.78}},
    {"mlperf", {0.10, 0.40, 0.24, 1.64, 0.30, 5.54, 3.44, 7.75}},
    {"small", {0.29, 0.42, 0.61, 5.70, 4.86, 6.13, 9.19, 8.58}},
    {"tiny", {1.23, 5.63, 5.48, 9.58, 18.06, 25.83, 32.23, 38.33}},
};

TEST(GapsTest, OfTheSlowestRank) {
  for (const Reached& reached : kReached) {
    std::size_t i = 0;
    for (const int ranks : {8, 16, 64, 128}) {
      for (const bool is_gpu : {false, true}) {
        const Problem problem = models::problem_of(reached.model, ranks, is_gpu);
        const PlanResult result = plan(problem);
        EXPECT_LE(100 * result.gap(), reached.percent[i])
            << reached.model << " on " << ranks << (is_gpu ? " gpu" : " cpu");
        EXPECT_TRUE(holds(result.certificate, problem));
        EXPECT_NO_THROW(check_plan(problem, result.plan));
        ++i;
      }
    }
  }
}

TEST(GapsTest, OfLinksAndMemoryApart) {
  const std::pair<const char*, double> kPhases[] = {{"colossal", 3.33}, {"jumbo", 4.80}};
  for (const auto& [model, percent] : kPhases) {
    Problem problem = models::problem_of(model, 64, false);
    problem.objective = Objective::kPhases;
    const PlanResult result = plan(problem);
    EXPECT_LE(100 * result.gap(), percent) << model;
    EXPECT_TRUE(holds(result.certificate, problem));
  }
}

TEST(GapsTest, WithLittleMemory) {
  for (const char* model : {"jumbo", "colossal"}) {
    for (const int ranks : {8, 16, 64}) {
      const Problem problem = models::problem_of(model, ranks, false, 1.05);
      const PlanResult result = plan(problem);
      EXPECT_LE(100 * result.gap(), 2) << model << " on " << ranks;
      EXPECT_TRUE(holds(result.certificate, problem));
      EXPECT_NO_THROW(check_plan(problem, result.plan));
    }
  }
}

}  // namespace
}  // namespace tessera::planner
