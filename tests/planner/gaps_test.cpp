// Certified gaps on public models: what was reached once may only get better.

#include <cstdio>

#include <sys/resource.h>

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
    {"colossal", {0.01, 0.02, 0.02, 0.03, 0.06, 0.04, 0.15, 0.07}},
    {"jumbo", {0.02, 0.05, 0.04, 0.03, 0.29, 0.17, 0.69, 0.16}},
    {"large", {0.04, 0.04, 0.03, 0.07, 0.50, 0.41, 0.44, 0.68}},
    {"medium", {0.05, 0.05, 0.12, 0.14, 0.30, 1.38, 0.80, 1.62}},
    {"mlperf", {0.10, 0.39, 0.24, 1.47, 0.30, 4.31, 3.44, 5.66}},
    {"small", {0.29, 0.42, 0.60, 5.38, 3.93, 5.53, 9.19, 6.62}},
    {"tiny", {1.19, 4.72, 5.48, 8.08, 18.06, 18.64, 32.23, 19.29}},
};

TEST(GapsTest, OfTheSlowestRank) {
  for (const Reached& reached : kReached) {
    std::size_t i = 0;
    for (const int ranks : {8, 16, 64, 128}) {
      for (const bool is_gpu : {false, true}) {
        const Problem problem = models::problem_of(reached.model, ranks, is_gpu);
        const PlanResult result = plan(problem);
        std::printf("%-9s on %3d %s: %.3f %%\n", reached.model, ranks, is_gpu ? "gpu" : "cpu",
                    100 * result.gap());
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
  struct Case {
    const char* model;
    bool is_gpu;
    double percent;
  };
  const Case kPhases[] = {{"colossal", false, 1.32},
                          {"colossal", true, 1.34},
                          {"jumbo", false, 1.43},
                          {"jumbo", true, 3.08}};
  for (const Case& one : kPhases) {
    Problem problem = models::problem_of(one.model, 64, one.is_gpu);
    problem.objective = Objective::kPhases;
    const PlanResult result = plan(problem);
    std::printf("%-9s phases %s: %.3f %%\n", one.model, one.is_gpu ? "gpu" : "cpu",
                100 * result.gap());
    EXPECT_LE(100 * result.gap(), one.percent) << one.model << (one.is_gpu ? " gpu" : " cpu");
    EXPECT_TRUE(holds(result.certificate, problem));
    EXPECT_NO_THROW(check_plan(problem, result.plan));
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

// 100,000 tables, no two alike, on 1,024 ranks: whole, in order, and in less than 2 GB.
TEST(GapsTest, OfVeryManyTables) {
  Problem problem;
  for (std::int64_t i = 0; i < 100'000; ++i) {
    Table& table = problem.tables.emplace_back();
    table.name = "t" + std::to_string(i);
    table.rows = 1000 + 7 * i;
    table.dim = 16 << (i % 4);
    table.features[0].ids = static_cast<double>(1 + i % 13);
  }
  problem.batch = 64;
  problem.ranks.assign(1024, {64e9, {}});
  problem.ranks_per_host = 8;
  problem.tries = 8;
  const PlanResult result = plan(problem);
  EXPECT_EQ(result.plan.size(), problem.tables.size());
  EXPECT_NO_THROW(check_plan(problem, result.plan));
  EXPECT_TRUE(holds(result.certificate, problem));
  EXPECT_LE(result.gap(), 0.05);
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  EXPECT_LE(used.ru_maxrss, 2'000'000) << "KiB";
}

}  // namespace
}  // namespace tessera::planner
