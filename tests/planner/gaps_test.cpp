// Certified gaps on public models: what was reached once may only get better.

#include <algorithm>
#include <cstdio>
#include <ctime>

#include <sys/resource.h>

#include <gtest/gtest.h>

#include "planner/kept_proofs.h"
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
    {"jumbo", {0.02, 0.05, 0.04, 0.03, 0.29, 0.17, 0.50, 0.16}},
    {"large", {0.04, 0.04, 0.03, 0.07, 0.50, 0.41, 0.44, 0.46}},
    {"medium", {0.05, 0.05, 0.12, 0.14, 0.30, 1.00, 0.80, 1.00}},
    {"mlperf", {0.10, 0.39, 0.24, 1.00, 0.30, 4.31, 1.15, 5.66}},
    {"small", {0.29, 0.42, 0.44, 4.90, 2.13, 4.79, 5.45, 5.35}},
    {"tiny", {0.80, 4.35, 2.81, 5.00, 9.67, 13.56, 12.38, 10.67}},
};

// Proof and plan hold, and are kept to be checked by another program.
void expect_holds(const Problem& problem, const PlanResult& result) {
  EXPECT_TRUE(holds(result.certificate, problem));
  EXPECT_NO_THROW(check_plan(problem, result.plan));
  static tests::KeptProofs kept("gaps");
  kept.keep(problem, result);
}

TEST(GapsTest, OfTheSlowestRank) {
  int num_small = 0;  // of the 36 that 1 % is asked of
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
        expect_holds(problem, result);
        const bool is_asked =
            problem.tables.size() > 300 || (problem.tables.size() == 26 && ranks <= 16);
        if (is_asked) {
          EXPECT_LE(result.gap(), 0.01);
          num_small += result.gap() <= 0.005 ? 1 : 0;
        }
        ++i;
      }
    }
  }
  EXPECT_GE(num_small, 32);
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
                          {"jumbo", true, 3.0}};
  for (const Case& one : kPhases) {
    Problem problem = models::problem_of(one.model, 64, one.is_gpu);
    problem.objective = Objective::kPhases;
    const PlanResult result = plan(problem);
    std::printf("%-9s phases %s: %.3f %%\n", one.model, one.is_gpu ? "gpu" : "cpu",
                100 * result.gap());
    EXPECT_LE(100 * result.gap(), one.percent) << one.model << (one.is_gpu ? " gpu" : " cpu");
    expect_holds(problem, result);
  }
}

// All tables cut in the same way, as by hand; empty where they are not.
Plan uniform_plan(const Problem& problem, Cut cut) {
  const int world = problem.num_ranks();
  const int local = problem.ranks_per_host;
  std::vector<const Table*> tables;
  for (const Table& table : problem.tables) tables.push_back(&table);
  const auto bytes = [](const Table* table) { return table->rows * table->dim; };
  std::stable_sort(tables.begin(), tables.end(),
                   [&](const Table* a, const Table* b) { return bytes(a) > bytes(b); });
  std::vector<double> held(problem.ranks.size());
  Plan plan;
  for (const Table* table : tables) {
    TablePlan& one = plan.emplace_back();
    one.name = table->name;
    one.cut = cut;
    // The ranks with least bytes: one, all of one host, or all.
    const int count = cut == Cut::kTableWise ? 1 : cut == Cut::kTableRowWise ? local : world;
    int first = 0;
    for (int r = 0; r < world; r += count) {
      if (held[static_cast<std::size_t>(r)] < held[static_cast<std::size_t>(first)]) first = r;
    }
    const bool is_columns = cut == Cut::kColumnWise;
    const std::int64_t all = is_columns ? table->dim : table->rows;
    const std::int64_t size = cut == Cut::kDataParallel ? all : (all + count - 1) / count;
    for (int i = 0; i < count; ++i) {
      const std::int64_t begin =
          cut == Cut::kDataParallel ? 0 : std::min<std::int64_t>(all, i * size);
      const std::int64_t some = std::min(size, all - begin);
      if (is_columns && some == 0) break;
      one.shards.push_back(is_columns ? Shard{0, begin, table->rows, some, first + i}
                                      : Shard{begin, 0, some, table->dim, first + i});
      held[static_cast<std::size_t>(first + i)] += static_cast<double>(bytes(table)) / count;
    }
  }
  std::sort(plan.begin(), plan.end(),
            [](const TablePlan& a, const TablePlan& b) { return a.name < b.name; });
  return plan;
}

TEST(GapsTest, NoUniformPlanIsFaster) {
  int num_compared = 0;
  for (const Reached& reached : kReached) {
    for (const int ranks : {2, 8, 64}) {
      for (const Objective objective : {Objective::kSum, Objective::kPhases}) {
        Problem problem = models::problem_of(reached.model, ranks, false);
        problem.objective = objective;
        problem.tries = 8;
        const double seconds = plan(problem).seconds;
        for (const Cut cut : {Cut::kTableWise, Cut::kColumnWise, Cut::kRowWise, Cut::kTableRowWise,
                              Cut::kDataParallel}) {
          const Plan uniform = uniform_plan(problem, cut);
          EXPECT_LE(seconds, step_seconds(problem, cost_of(problem, uniform)) * (1 + 1e-9))
              << reached.model << " on " << ranks << " beside " << name_of(cut);
          ++num_compared;
        }
      }
    }
  }
  EXPECT_EQ(num_compared, 7 * 3 * 2 * 5);
}

TEST(GapsTest, WithLittleMemory) {
  for (const char* model : {"jumbo", "colossal"}) {
    for (const int ranks : {8, 16, 64}) {
      for (const bool is_gpu : {false, true}) {
        const Problem problem = models::problem_of(model, ranks, is_gpu, 1.05);
        const PlanResult result = plan(problem);
        EXPECT_LE(100 * result.gap(), 2) << model << " on " << ranks << (is_gpu ? " GPUs" : "");
        expect_holds(problem, result);
      }
    }
  }
}

// 100,000 tables, no two alike, on 1,024 ranks: whole, in order, in at most 10 s and 2 GB.
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
  const std::clock_t begin = std::clock();  // of the processor: the machine may have other work
  const PlanResult result = plan(problem);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
#ifdef NDEBUG
  EXPECT_LE(seconds, 10);
#endif
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
