// Replanning: what grew, shrank, came or went, and how little moves.

#include <cstdio>
#include <set>

#include <gtest/gtest.h>

#include "planner/kept_proofs.h"
#include "planner/public_models.h"
#include "tessera/planner/explain.h"
#include "tessera/planner/replan.h"

namespace tessera::planner {
namespace {

// A replan whose plan is checked once more, by the checker that shares no code with the planner.
Replan kept_replan(const Problem& problem, const Plan& previous, double max_moved,
                   double steps_left = 0) {
  static tests::KeptProofs proofs("replan");
  Replan found = replan(problem, previous, max_moved, steps_left);
  proofs.keep(problem, found.result);
  return found;
}

// Every cell of every table of both plans is on its rank of `after` already, or is moved there.
void expect_moves_suffice(const Plan& before, const Replan& found) {
  double moved = 0;
  for (const Move& move : found.moves) {
    EXPECT_NE(move.from, move.part.rank);
    moved += static_cast<double>(move.part.rows) * static_cast<double>(move.part.columns) * 4;
  }
  EXPECT_NEAR(moved, found.moved_bytes, 1e-6 * moved);
  EXPECT_EQ(moves_between(before, found.result.plan), found.moves);
}

void expect_good(const Problem& problem, const Plan& before, const Replan& found, double moved,
                 double gap) {
  EXPECT_NO_THROW(check_plan(problem, found.result.plan));
  EXPECT_TRUE(holds(found.result.certificate, problem));
  EXPECT_LE(found.moved_bytes, moved * found.total_bytes * (1 + 1e-9));
  EXPECT_LE(100 * found.result.gap(), gap);
  expect_moves_suffice(before, found);
}

TEST(ReplanTest, MovesAreWhatIsNotThereYet) {
  const Plan before{{"a", Cut::kTableWise, Kernel::kFused, {{0, 0, 10, 8, 1}}},
                    {"b", Cut::kDataParallel, Kernel::kFused, {{0, 0, 3, 8, 0}, {0, 0, 3, 8, 1}}}};
  const Plan after{{"a", Cut::kColumnWise, Kernel::kFused, {{0, 0, 10, 4, 1}, {0, 4, 10, 4, 0}}},
                   {"b", Cut::kTableWise, Kernel::kFused, {{0, 0, 3, 8, 1}}},
                   {"c", Cut::kTableWise, Kernel::kFused, {{0, 0, 3, 8, 1}}}};
  EXPECT_EQ(moves_between(before, after), (std::vector<Move>{{"a", {0, 4, 10, 4, 0}, 1}}));
  // Rows: a third of them stays, if there is one rank more.
  const Plan rows{{"a", Cut::kRowWise, Kernel::kFused, {{0, 0, 6, 2, 0}, {6, 0, 6, 2, 1}}}};
  const Plan more{
      {"a", Cut::kRowWise, Kernel::kFused, {{0, 0, 4, 2, 0}, {4, 0, 4, 2, 1}, {8, 0, 4, 2, 2}}}};
  EXPECT_EQ(moves_between(rows, more),
            (std::vector<Move>{{"a", {4, 0, 2, 2, 1}, 0}, {"a", {8, 0, 4, 2, 2}, 1}}));
}

TEST(ReplanTest, NothingChangedNothingMoves) {
  const Problem problem = models::problem_of("mlperf", 8, false);
  const Plan before = plan(problem).plan;
  const Replan found = kept_replan(problem, before, 0.05);
  EXPECT_TRUE(found.moves.empty());
  EXPECT_EQ(plan_json(found.result.plan, "m"), plan_json(before, "m"));
}

TEST(ReplanTest, ATableGrowsByATenth) {
  for (const char* model : {"mlperf", "medium", "jumbo"}) {
    for (const int ranks : {8, 16}) {
      Problem problem = models::problem_of(model, ranks, false);
      const PlanResult before = plan(problem);
      // The one that costs most.
      Table* largest = &problem.tables[0];
      for (Table& table : problem.tables) {
        if (table.rows * table.dim > largest->rows * largest->dim) largest = &table;
      }
      largest->rows += largest->rows / 10;
      largest->features.back().ids *= 1.1;
      const Replan found = kept_replan(problem, before.plan, 0.02);
      SCOPED_TRACE(std::string(model) + " on " + std::to_string(ranks));
      // No rank is too full, and what grew is not cut by rows: all moves are chosen.
      const Replan still = kept_replan(problem, before.plan, 0);
      std::printf("%s on %d ranks: %.4f %% of the bytes must move, %.4f %% do, gap %.2f %%\n",
                  model, ranks, 100 * still.moved_bytes / still.total_bytes,
                  100 * found.moved_bytes / found.total_bytes, 100 * found.result.gap());
      EXPECT_EQ(still.moved_bytes, 0);
      expect_good(problem, before.plan, found, 0.02, 2);
      EXPECT_LE(found.result.seconds, found.previous_seconds * (1 + 1e-9));
    }
  }
}

TEST(ReplanTest, TablesComeAndGo) {
  Problem problem = models::problem_of("medium", 8, false);
  const Plan before = plan(problem).plan;
  Table added = problem.tables[30];
  added.name = "new";
  problem.tables[3] = added;
  const Replan found = kept_replan(problem, before, 0.02);
  expect_good(problem, before, found, 0.02, 1);
  EXPECT_EQ(found.appeared, std::vector<std::string>{"new"});
  EXPECT_EQ(found.vanished, std::vector<std::string>{"t0003"});
  EXPECT_TRUE(found.changed.empty());
}

TEST(ReplanTest, TablesOfOtherSizesAreNamed) {
  Problem problem = models::problem_of("medium", 8, false);
  const Plan before = plan(problem).plan;
  problem.tables[3].rows += 1;
  problem.tables[5].dim *= 2;
  problem.tables[7].features[0].ids *= 2;  // not its size
  const Replan found = kept_replan(problem, before, 0.02);
  EXPECT_EQ(found.changed, (std::vector<std::string>{"t0003", "t0005"}));
  EXPECT_TRUE(found.appeared.empty());
  EXPECT_TRUE(found.vanished.empty());
}

// Rows that are gone go from where they were; what is left moves by choice alone.
TEST(ReplanTest, ATableShrinks) {
  for (const char* model : {"mlperf", "medium"}) {
    SCOPED_TRACE(model);
    Problem problem = models::problem_of(model, 8, false);
    const Plan before = plan(problem).plan;
    Table* largest = &problem.tables[0];
    for (Table& table : problem.tables) {
      if (table.rows * table.dim > largest->rows * largest->dim) largest = &table;
    }
    largest->rows /= 2;
    largest->features.back().ids /= 2;
    const Replan still = kept_replan(problem, before, 0);
    const Replan found = kept_replan(problem, before, 0.05);
    EXPECT_EQ(found.changed, std::vector<std::string>{largest->name});
    EXPECT_EQ(still.moved_bytes, 0);
    expect_good(problem, before, found, 0.05, 2);
    EXPECT_LE(found.result.seconds, found.previous_seconds * (1 + 1e-9));
    for (const TablePlan& one : found.result.plan) {
      if (one.name != largest->name) continue;
      for (const Shard& shard : one.shards) EXPECT_LE(shard.row + shard.rows, largest->rows);
    }
  }
}

// Bytes over the links of the rank that has most to send or to take: a column of float32 with what
// row-wise Adagrad keeps of each row.
TEST(ReplanTest, MovesTakeTheBusiestRanksLinks) {
  Problem problem;
  problem.batch = 100;
  problem.ranks.assign(4, {});
  problem.ranks_per_host = 2;
  for (Rank& rank : problem.ranks) {
    rank.speeds.host = 4e9;
    rank.speeds.network = 1e9;
  }
  for (const char* name : {"a", "b", "c"}) {
    Table& table = problem.tables.emplace_back();
    table.name = name;
    table.rows = 1000;
    table.dim = 8;
    problem.rules[name].cuts = {Cut::kTableWise};
  }
  problem.rules["a"].ranks = {1};
  problem.rules["b"].ranks = {2};
  problem.rules["c"].ranks = {3};
  const auto whole = [](const char* name, int rank) {
    return TablePlan{name, Cut::kTableWise, Kernel::kFused, {{0, 0, 1000, 8, rank}}};
  };
  const double bytes = 1000 * (8 * 4 + 4);
  // From rank 0 inside its host and out of it; ranks beside each other do not wait for each other.
  const Plan before{whole("a", 0), whole("b", 0), whole("c", 2)};
  const Replan found = kept_replan(problem, before, 0);
  ASSERT_EQ(found.moves.size(), 3U);
  EXPECT_NEAR(found.moving_seconds, bytes / 4e9 + bytes / 1e9, 1e-12);
}

TEST(ReplanTest, MovesArePaidBackByTheStepsThatAreLeft) {
  Problem problem = models::problem_of("medium", 8, false);
  const Plan before = plan(problem).plan;
  for (std::size_t t = 0; t < problem.tables.size(); t += 3) problem.tables[t].features[0].ids *= 3;
  const Replan none = kept_replan(problem, before, 0);
  const Replan free = kept_replan(problem, before, 1);
  ASSERT_FALSE(free.moves.empty());
  EXPECT_TRUE(kept_replan(problem, before, 1, 1e-9).moves.empty());
  EXPECT_EQ(kept_replan(problem, before, 1, 1e15).moves, free.moves);
  const auto whole = [](const Replan& one, double steps) {
    return one.result.seconds * steps + one.moving_seconds;
  };
  bool is_between = false;
  for (double steps = 1e-4; steps < 1e4; steps *= 3) {
    SCOPED_TRACE(steps);
    const Replan found = kept_replan(problem, before, 1, steps);
    EXPECT_NO_THROW(check_plan(problem, found.result.plan));
    expect_moves_suffice(before, found);
    EXPECT_LE(whole(found, steps), whole(none, steps) * (1 + 1e-9));
    EXPECT_LE(whole(found, steps), whole(free, steps) * (1 + 1e-9));
    is_between |= found.moved_bytes > 0 && found.moved_bytes < free.moved_bytes;
  }
  EXPECT_TRUE(is_between);
}

TEST(ReplanTest, ARankIsLostAndOneHasLessMemory) {
  Problem problem = models::problem_of("medium", 8, false);
  const Plan before = plan(problem).plan;
  // An eighth must go; row cuts move more.
  problem.ranks.resize(7);
  problem.ranks_per_host = 7;
  const Replan fewer = kept_replan(problem, before, 0.05);
  expect_good(problem, before, fewer, 1, 5);
  // What its columns asked for is not asked for twice by a rank that has others of the table.
  for (const TablePlan& one : fewer.result.plan) {
    std::set<int> ranks;
    for (const Shard& shard : one.shards) EXPECT_TRUE(ranks.insert(shard.rank).second) << one.name;
  }
  const Plan fresh = plan(problem).plan;
  double all = 0;
  for (const Move& move : moves_between(before, fresh)) {
    all += static_cast<double>(move.part.rows) * static_cast<double>(move.part.columns) * 4;
  }
  EXPECT_LT(fewer.moved_bytes, 0.7 * all);

  Problem tight = models::problem_of("medium", 8, false);
  for (Rank& rank : tight.ranks) rank.memory = 40e9;
  const Plan even = plan(tight).plan;
  tight.ranks[2].memory /= 2;
  const Replan moved = kept_replan(tight, even, 0.05);
  EXPECT_NO_THROW(check_plan(tight, moved.result.plan));
  expect_moves_suffice(even, moved);
  EXPECT_LT(moved.moved_bytes, 0.25 * moved.total_bytes);
}

// Rows of equal load stay where they are when the table grows: only the new ones are elsewhere.
TEST(ReplanTest, RowsOfEqualLoadStay) {
  Problem problem = models::problem_of("tiny", 4, false);
  Table& table = problem.tables[0];
  problem.rules[table.name].cuts = {Cut::kRowWise};
  const auto rows = static_cast<double>(table.rows);
  table.ids_below = {{rows / 100, 0.9}, {rows, 1}};
  const Plan before = plan(problem).plan;
  ASSERT_LT(before[0].shards[0].rows, before[0].shards[3].rows);
  table.rows += 1000;
  table.ids_below = {{rows / 100, 0.9}, {rows + 1000, 1}};
  const Replan found = kept_replan(problem, before, 0);
  EXPECT_NO_THROW(check_plan(problem, found.result.plan));
  ASSERT_EQ(found.result.plan[0].shards.size(), 4U);
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(found.result.plan[0].shards[r], before[0].shards[r]);
  }
  EXPECT_EQ(found.result.plan[0].shards[3].rows, before[0].shards[3].rows + 1000);
}

// Two ranks, one table that may be cut into columns.
Problem problem_of_columns(std::int64_t dim, std::int64_t min_columns) {
  Problem problem;
  problem.ranks.assign(2, {});
  problem.ranks_per_host = 2;
  Table& table = problem.tables.emplace_back();
  table.name = "a";
  table.rows = 100'000;
  table.dim = dim;
  problem.rules["a"].cuts = {Cut::kTableWise, Cut::kColumnWise};
  problem.rules["a"].min_columns = min_columns;
  return problem;
}

// As the bound has them: 10 columns are 5 and 5, 128 in parts of at least 24 are multiples of 32.
TEST(ReplanTest, ColumnsMoveInWholeUnits) {
  struct Case {
    std::int64_t dim;
    std::int64_t min_columns;
    double too_little;  // of the bytes, to move a unit
    double enough;
    std::int64_t moved;  // columns
  };
  for (const Case& one : {Case{10, 0, 0.45, 0.55, 5}, Case{128, 24, 0.2, 0.3, 32}}) {
    SCOPED_TRACE(one.dim);
    const Problem problem = problem_of_columns(one.dim, one.min_columns);
    const Plan before{{"a", Cut::kTableWise, Kernel::kFused, {{0, 0, 100'000, one.dim, 0}}}};
    const Replan still = kept_replan(problem, before, one.too_little);
    EXPECT_TRUE(still.moves.empty());
    EXPECT_EQ(still.result.plan[0].shards, before[0].shards);
    const Replan found = kept_replan(problem, before, one.enough);
    EXPECT_EQ(found.result.plan[0].cut, Cut::kColumnWise);
    ASSERT_EQ(found.result.plan[0].shards.size(), 2U);
    EXPECT_EQ(found.moved_bytes, static_cast<double>(one.moved) * 100'000 * 4);
    EXPECT_LT(found.result.seconds, found.previous_seconds);
    expect_moves_suffice(before, found);
  }
}

// What today's rules, or the bound, have no place for is laid as the planner would.
TEST(ReplanTest, PartsThatMayNotBeAreLaidAnew) {
  const Problem problem = problem_of_columns(16, 8);
  const std::vector<Shard> narrow{{0, 0, 100'000, 4, 0}, {0, 4, 100'000, 12, 1}};
  const std::vector<Shard> whole{{0, 0, 100'000, 16, 1}};
  for (const TablePlan& old : {TablePlan{"a", Cut::kColumnWise, Kernel::kFused, narrow},
                               TablePlan{"a", Cut::kTableWise, Kernel::kDense, whole}}) {
    SCOPED_TRACE(name_of(old.cut));
    const Plan before{old};
    const Replan found = kept_replan(problem, before, 0);
    EXPECT_EQ(found.result.plan[0].kernel, Kernel::kFused);
    for (const Shard& shard : found.result.plan[0].shards) EXPECT_EQ(shard.columns % 8, 0);
    expect_moves_suffice(before, found);
  }
}

// The host of ranks 4 and 5 is gone: what lay on it goes to one other, not to the emptiest ranks.
TEST(ReplanTest, PartsOfAHostGoToOneHost) {
  Problem problem = problem_of_columns(16, 0);
  problem.ranks.assign(4, {});
  problem.rules["a"].cuts = {Cut::kTableColumnWise};
  problem.rules["a"].ranks = {0, 2, 3};
  const Plan before{
      {"a", Cut::kTableColumnWise, Kernel::kFused, {{0, 0, 100'000, 8, 4}, {0, 8, 100'000, 8, 5}}}};
  const Replan found = kept_replan(problem, before, 0.05);
  std::set<int> hosts;
  for (const Shard& shard : found.result.plan[0].shards) hosts.insert(shard.rank / 2);
  EXPECT_EQ(hosts.size(), 1U);
  expect_moves_suffice(before, found);
}

// A file may list parts in any order: columns go to the part beside them, not to the next in it.
TEST(ReplanTest, PartsMayComeInAnyOrder) {
  Problem problem = problem_of_columns(16, 0);
  Table& other = problem.tables.emplace_back(problem.tables[0]);
  other.name = "b";
  problem.rules["b"].ranks = {1};
  problem.rules["b"].cuts = {Cut::kTableWise};
  const Plan before{
      {"a", Cut::kColumnWise, Kernel::kFused, {{0, 8, 100'000, 8, 1}, {0, 0, 100'000, 8, 0}}},
      {"b", Cut::kTableWise, Kernel::kFused, {{0, 0, 100'000, 16, 1}}}};
  const Replan found = kept_replan(problem, before, 0.13);
  EXPECT_NO_THROW(check_plan(problem, found.result.plan));
  expect_moves_suffice(before, found);
}

TEST(ReplanTest, PlansAreReadFromFiles) {
  const Problem problem = models::problem_of("tiny", 8, false);
  const PlanResult result = plan(problem);
  const std::string text = plan_json(result.plan, "tables");
  EXPECT_EQ(plan_json(plan_from_json(text), "tables"), text);
  EXPECT_EQ(plan_json(plan_from_json(to_json(problem, result)), "tables"), text);
  for (const char* bad : {"", "{}", R"({"version": 1, "modules": {}})",
                          R"({"version": 1, "modules": {"a": {"t": {"type": "odd"}}}})",
                          R"({"version": 1, "modules": {"a": 3}})"}) {
    EXPECT_THROW(plan_from_json(bad), PlanError) << bad;
  }
  Plan twice = result.plan;
  twice.push_back(twice[0]);
  EXPECT_THROW(replan(problem, twice, 0.1), PlanError);
}

}  // namespace
}  // namespace tessera::planner
