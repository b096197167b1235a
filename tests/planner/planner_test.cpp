#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include <gtest/gtest.h>

#include "planner/public_models.h"
#include "tessera/planner/explain.h"
#include "tessera/planner/options.h"
#include "tessera/planner/planner.h"
#include "tessera/planner/replan.h"

namespace tessera::planner {
namespace {

Problem small_problem() {
  Problem problem;
  for (int t = 0; t < 6; ++t) {
    Table table;
    table.name = "table_" + std::to_string(t);
    table.rows = 1000 * (t + 1);
    table.dim = 16;
    table.features[0].ids = 1 + t;
    problem.tables.push_back(std::move(table));
  }
  problem.ranks.assign(4, {});
  problem.ranks_per_host = 2;
  return problem;
}

PlanErrorKind kind_of(const Problem& problem, std::string* text = nullptr) {
  try {
    plan(problem);
  } catch (const PlanError& error) {
    if (text != nullptr) *text = error.what();
    return error.kind();
  }
  ADD_FAILURE() << "there is a plan";
  return PlanErrorKind::kBadProblem;
}

TEST(PlannerTest, ShareOfTouchedRowsIsThatOfEvenIds) {
  Problem problem = small_problem();
  Table table = problem.tables[0];
  table.rows = 1000;
  table.features = {{1}};
  problem.batch = 250;  // 1000 ids over 1000 rows
  EXPECT_NEAR(CostModel(problem).load_of(table).touched, 1 - std::exp(-1.0005), 1e-5);
  table.rows = 1'000'000'000;
  EXPECT_NEAR(CostModel(problem).load_of(table).touched * 1e9, 1000, 1e-3);
  table.features[0].distinct = {{100, 50}, {2000, 100}};
  EXPECT_NEAR(CostModel(problem).load_of(table).touched * 1e9, 50 + 50 * 900.0 / 1900, 1e-6);
}

TEST(PlannerTest, CostsAreThoseOfTheDefinition) {
  Problem problem = small_problem();
  problem.batch = 100;
  Table table = problem.tables[0];
  table.rows = 1'000'000;
  table.dim = 32;
  table.features = {{2}};
  const CostModel model(problem);
  const CostModel::TableLoad load = model.load_of(table);
  EXPECT_EQ(load.ids, 800);
  EXPECT_EQ(load.outputs, 400);
  const ShardCost cost =
      model.cost(table, load, Cut::kTableWise, Kernel::kFused, table.rows, table.dim, 0);
  // A quarter stays here, a quarter goes inside the host, two to the other one.
  const double link = 0.25 / 25e9 + 0.5 / 12.5e9;
  EXPECT_DOUBLE_EQ(cost.seconds.ids, (800 * 8 + 400 * 4) * link);
  EXPECT_DOUBLE_EQ(cost.seconds.rows, 400 * 32 * 4 * link);
  EXPECT_DOUBLE_EQ(cost.seconds.gradients, cost.seconds.rows);
  EXPECT_DOUBLE_EQ(cost.seconds.lookup, 800 * 32 * 4 / 51e9);
  EXPECT_NEAR(cost.seconds.step, (800 * 128 + 2 * 799.68 * (128 + 4)) / 51e9, 1e-11);
  EXPECT_EQ(cost.bytes.weights, 128e6);
  EXPECT_EQ(cost.bytes.optimizer, 4e6);
  const ShardCost dense =
      model.cost(table, load, Cut::kDataParallel, Kernel::kDense, table.rows, table.dim, 0);
  EXPECT_EQ(dense.bytes.optimizer, 4e6 + 3 * 128e6);
}

// Ids of rows that are known to be asked for more often go to the ranks of these rows.
TEST(PlannerTest, RowsAreCutByHowOftenTheyAreAskedFor) {
  Problem problem = small_problem();
  problem.tables.resize(1);
  Table& table = problem.tables[0];
  table.rows = 1'000'000;
  table.features = {{20}};
  table.ids_below = {{1000, 0.75}, {1e6, 1}};
  EXPECT_EQ(rows_of_equal_load(table, 4), (std::vector<std::int64_t>{333, 334, 333, 999'000}));
  // A row that is asked for more than the share of a rank leaves another none.
  Table hot = table;
  hot.ids_below = {{1, 0.6}, {1e6, 1}};
  EXPECT_EQ(rows_of_equal_load(hot, 4)[0], 0);
  EXPECT_EQ(rows_of_equal_load(hot, 4)[1], 1);
  const CostModel model(problem);
  const CostModel::TableLoad load = model.load_of(table);
  const auto cost = [&](std::int64_t row, std::int64_t rows) {
    return model.cost(table, load, Cut::kRowWise, Kernel::kFused, rows, table.dim, 0, row);
  };
  EXPECT_DOUBLE_EQ(cost(0, 1000).seconds.lookup, 3 * cost(1000, 999'000).seconds.lookup);
  EXPECT_DOUBLE_EQ(cost(0, 500).seconds.lookup, cost(500, 500).seconds.lookup);
  problem.rules[table.name].cuts = {Cut::kRowWise};
  const PlanResult found = plan(problem);
  ASSERT_EQ(found.plan[0].shards.size(), 4U);
  EXPECT_EQ(found.plan[0].shards[1], (Shard{333, 0, 334, 16, 1}));
  EXPECT_NO_THROW(check_plan(problem, found.plan));
  EXPECT_TRUE(holds(found.certificate, problem));
  Plan even = found.plan;
  for (int r = 0; r < 4; ++r)
    even[0].shards[static_cast<std::size_t>(r)] = {r * 250'000, 0, 250'000, 16, r};
  EXPECT_GT(step_seconds(problem, cost_of(problem, even)), 2 * found.seconds);
  // Where memory does not suffice for so many cold rows, they are even.
  for (Rank& rank : problem.ranks) rank.memory = 60e6;
  EXPECT_EQ(plan(problem).plan[0].shards[1], even[0].shards[1]);

  std::string text;
  problem.tables[0].ids_below = {{1000, 0.75}, {900, 1}};
  EXPECT_EQ(kind_of(problem, &text), PlanErrorKind::kBadProblem);
  EXPECT_EQ(text,
            "plan: table 'table_0' has ids below rows that do not rise, or are more than all");
  problem.tables[0].ids_below = {{1000, 0.75}};
  EXPECT_EQ(kind_of(problem, &text), PlanErrorKind::kBadProblem);
  EXPECT_EQ(text,
            "plan: table 'table_0' has ids below rows that do not end with all ids below the last "
            "row");
}

TEST(PlannerTest, OrderOfTablesChangesNothing) {
  Problem problem = models::problem_of("small", 16, false);
  const std::string first = to_json(problem, plan(problem));
  std::reverse(problem.tables.begin(), problem.tables.end());
  EXPECT_EQ(to_json(problem, plan(problem)), first);
  std::rotate(problem.tables.begin(), problem.tables.begin() + 31, problem.tables.end());
  EXPECT_EQ(to_json(problem, plan(problem)), first);
}

TEST(PlannerTest, AlteredCertificatesAreRefused) {
  for (const double room : {1.15, 1.03}) {
    const Problem problem = models::problem_of("jumbo", 16, false, room);
    const Certificate good = plan(problem).certificate;
    ASSERT_TRUE(holds(good, problem));
    Certificate bad = good;
    bad.seconds *= 1.0001;
    EXPECT_FALSE(holds(bad, problem));
    bad = good;
    bad.prices[0].second *= 1.01;
    bad.seconds *= 1.005;
    EXPECT_FALSE(holds(bad, problem));
    bad = good;
    bad.prices[0].byte = good.prices[0].byte * 2 + 1e-15;
    EXPECT_FALSE(holds(bad, problem));
    bad = good;
    bad.prices[0].byte = -1;
    EXPECT_FALSE(holds(bad, problem));
    bad = good;
    bad.prices[0].num_ranks += 1;
    EXPECT_FALSE(holds(bad, problem));
    bad = good;
    bad.prices[0].capacity *= 1.01;
    EXPECT_FALSE(holds(bad, problem));
    bad = good;
    bad.prices.clear();
    EXPECT_FALSE(holds(bad, problem));
    bad = good;
    bad.table = problem.tables[0].name;
    EXPECT_FALSE(holds(bad, problem));
    bad.table = "nobody";
    EXPECT_FALSE(holds(bad, problem));
  }
}

TEST(PlannerTest, RulesAreObeyed) {
  Problem problem = small_problem();
  problem.rules["table_5"].cuts = {Cut::kRowWise};
  problem.rules["table_4"].ranks = {3};
  problem.rules["table_3"].cuts = {Cut::kTableRowWise};
  problem.rules["table_2"].cuts = {Cut::kDataParallel};
  problem.rules["table_2"].kernels = {Kernel::kDense};
  problem.rules["table_1"].cuts = {Cut::kColumnWise};
  problem.rules["table_1"].min_columns = 8;
  problem.rules["table_0"].cuts = {Cut::kGrid};
  const PlanResult result = plan(problem);
  check_plan(problem, result.plan);
  EXPECT_TRUE(holds(result.certificate, problem));
  EXPECT_EQ(result.plan[5].cut, Cut::kRowWise);
  for (const Shard& shard : result.plan[4].shards) EXPECT_EQ(shard.rank, 3);
  EXPECT_EQ(result.plan[3].cut, Cut::kTableRowWise);
  EXPECT_EQ(result.plan[3].shards.size(), 2u);
  EXPECT_EQ(result.plan[2].cut, Cut::kDataParallel);
  EXPECT_EQ(result.plan[2].kernel, Kernel::kDense);
  EXPECT_EQ(result.plan[1].cut, Cut::kColumnWise);
  for (const Shard& shard : result.plan[1].shards) EXPECT_GE(shard.columns, 8);
  EXPECT_EQ(result.plan[0].cut, Cut::kGrid);
}

std::set<int> ranks_of(const PlanResult& result, const std::string& name) {
  std::set<int> ranks;
  for (const TablePlan& one : result.plan) {
    if (one.name != name) continue;
    for (const Shard& shard : one.shards) ranks.insert(shard.rank);
  }
  return ranks;
}

TEST(PlannerTest, TablesLieTogetherAndApart) {
  Problem problem = models::problem_of("mlperf", 8, false);
  const std::string first = problem.tables[0].name;
  const std::string second = problem.tables[1].name;
  const std::string third = problem.tables[9].name;
  const std::string fourth = problem.tables[19].name;
  problem.together = {{second, first}};
  problem.apart = {{first, third, fourth}};
  problem.rules[second].ranks = {2, 5};
  const PlanResult result = plan(problem);
  EXPECT_EQ(result.plan.size(), problem.tables.size());
  EXPECT_EQ(result.reasons.size(), problem.tables.size());
  EXPECT_EQ(ranks_of(result, first).size(), 1U);
  EXPECT_EQ(ranks_of(result, first), ranks_of(result, second));
  EXPECT_EQ(std::set<int>({2, 5}).count(*ranks_of(result, first).begin()), 1U);
  std::set<int> all;
  std::size_t count = 0;
  for (const std::string& name : {first, third, fourth}) {
    const std::set<int> ranks = ranks_of(result, name);
    all.insert(ranks.begin(), ranks.end());
    count += ranks.size();
  }
  EXPECT_EQ(all.size(), count);
  EXPECT_TRUE(holds(result.certificate, problem));
  EXPECT_NO_THROW(check_plan(problem, result.plan));
  EXPECT_EQ(to_json(problem_from_json(to_json(problem))), to_json(problem));
  // The plan without these rules breaks them, and is refused by name.
  Problem free = problem;
  free.together.clear();
  free.apart.clear();
  free.rules.clear();
  try {
    check_plan(problem, plan(free).plan);
    FAIL() << "refused nothing";
  } catch (const PlanError& error) {
    EXPECT_EQ(error.kind(), PlanErrorKind::kBadEvidence);
  }
  EXPECT_LE(plan(free).certificate.seconds, result.certificate.seconds * (1 + 1e-9));
  try {
    replan(problem, result.plan, 0.05);
    FAIL() << "planned again";
  } catch (const PlanError& error) {
    EXPECT_EQ(error.kind(), PlanErrorKind::kBadProblem);
  }
}

TEST(PlannerTest, ListsThatCannotBeMeantAreNamed) {
  const auto text_of = [](const auto& change, PlanErrorKind kind) {
    Problem problem = models::problem_of("mlperf", 8, false);
    change(problem);
    try {
      plan(problem);
    } catch (const PlanError& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  const auto has = [](const std::string& text, const char* words) {
    EXPECT_NE(text.find(words), std::string::npos) << text;
  };
  using Kind = PlanErrorKind;
  has(text_of([](Problem& p) { p.apart = {{"t0000", "nobody"}}; }, Kind::kBadProblem), "'nobody'");
  has(text_of([](Problem& p) { p.apart = {{"t0000"}}; }, Kind::kBadProblem), "fewer than two");
  has(text_of([](Problem& p) { p.apart = {{"t0000", "t0000"}}; }, Kind::kBadProblem), "twice");
  has(text_of([](Problem& p) { p.together = {{"t0000", "t0001"}, {"t0001", "t0002"}}; },
              Kind::kBadProblem),
      "two lists");
  has(text_of([](Problem& p) { p.apart = p.together = {{"t0000", "t0001"}}; }, Kind::kRules),
      "apart, and together");
  has(text_of(
          [](Problem& p) {
            p.together = {{"t0000", "t0001"}};
            p.rules["t0000"].ranks = {1};
            p.rules["t0001"].ranks = {2};
          },
          Kind::kRules),
      "no rank in common");
  has(text_of(
          [](Problem& p) {
            p.apart = {{"t0000", "t0001"}};
            p.rules["t0000"].ranks = p.rules["t0001"].ranks = {1};
          },
          Kind::kRules),
      "may lie on 1 ranks");
  has(text_of(
          [](Problem& p) {
            p.together = {{"t0000", "t0001"}};
            p.rules["t0000"].cuts = {Cut::kRowWise};
          },
          Kind::kRules),
      "may not be whole");
}

// Parts of a table with exact norms sum gradients before the step: whole it is the fastest.
TEST(PlannerTest, AWholeTableMayFitWhereNoPartDoes) {
  Problem problem;
  Table& table = problem.tables.emplace_back();
  table.name = "norms";
  table.rows = 1000;
  table.dim = 16;
  table.features[0].ids = 100;
  table.has_exact_norms = true;
  problem.rules["norms"].cuts = {Cut::kTableWise, Cut::kColumnWise};
  Rank rank;
  rank.speeds.merge_seconds = 1e-3;
  problem.ranks.assign(4, rank);
  problem.ranks_per_host = 4;
  for (const bool is_mixed : {false, true}) {
    if (is_mixed) problem.ranks[3].speeds.memory *= 2;
    const PlanResult result = plan(problem);
    EXPECT_EQ(result.plan[0].cut, Cut::kTableWise);
    EXPECT_LE(result.certificate.seconds, result.seconds);
    EXPECT_TRUE(holds(result.certificate, problem));
  }
}

TEST(PlannerTest, RulesThatCostMuchAreToldWithTheirPrice) {
  Problem problem = models::problem_of("mlperf", 8, false);
  problem.rules["t0020"].ranks = {3};
  const std::string text = summary(problem, plan(problem));
  EXPECT_NE(text.find("rules    without those of 't0020' up to "), std::string::npos) << text;
  problem.rules.clear();
  EXPECT_EQ(summary(problem, plan(problem)).find("rules"), std::string::npos);
}

TEST(PlannerTest, ContradictingRulesAreNamed) {
  Problem problem = small_problem();
  problem.rules["table_1"].cuts = {Cut::kRowWise};
  problem.rules["table_1"].ranks = {0, 1};
  problem.rules["table_1"].kernels = {Kernel::kFused};
  std::string text;
  EXPECT_EQ(kind_of(problem, &text), PlanErrorKind::kRules);
  EXPECT_NE(text.find("'table_1'"), std::string::npos) << text;
  EXPECT_NE(text.find("cuts row_wise; ranks, 2 of 4"), std::string::npos) << text;
  EXPECT_EQ(text.find("kernels"), std::string::npos) << text;
}

TEST(PlannerTest, OneTableThatFitsNowhereGetsAdviceThatHelps) {
  Problem problem = small_problem();
  problem.tables[2].rows = 400'000'000;
  problem.tables[2].dim = 128;
  for (Rank& rank : problem.ranks) rank.memory = 16e9;
  std::string text;
  EXPECT_EQ(kind_of(problem, &text), PlanErrorKind::kTooLarge);
  EXPECT_NE(text.find("table 'table_2' (206 GB with state) fits no rank"), std::string::npos)
      << text;
  // Every piece of advice was computed; take the first two.
  const std::size_t advice = text.find("try: ");
  ASSERT_NE(advice, std::string::npos) << text;
  const int ranks = std::stoi(text.substr(advice + 5));
  Problem larger = problem;
  larger.ranks.assign(static_cast<std::size_t>(ranks), problem.ranks[0]);
  EXPECT_NO_THROW(plan(larger)) << text;
  larger.ranks.resize(static_cast<std::size_t>(ranks - 2));
  EXPECT_THROW(plan(larger), PlanError) << text;
  const std::size_t memory = text.find(", or ", advice) + 5;
  Problem richer = problem;
  for (Rank& rank : richer.ranks) rank.memory = std::stod(text.substr(memory)) * 1e9;
  EXPECT_NO_THROW(plan(richer)) << text;
}

TEST(PlannerTest, AllTogetherTooLarge) {
  Problem problem = models::problem_of("medium", 8, false);
  for (Rank& rank : problem.ranks) rank.memory = 24e9;
  std::string text;
  EXPECT_EQ(kind_of(problem, &text), PlanErrorKind::kTooLarge);
  EXPECT_NE(text.find("311 tables need"), std::string::npos) << text;
  EXPECT_NE(text.find("try: 16 ranks"), std::string::npos) << text;
  EXPECT_NE(text.find("rows of 2 bytes"), std::string::npos) << text;
}

TEST(PlannerTest, RanksThatDiffer) {
  Problem problem = models::problem_of("medium", 16, false);
  for (int r = 8; r < 16; ++r) problem.ranks[static_cast<std::size_t>(r)].speeds.memory /= 2;
  problem.ranks[15].memory = 0;
  const PlanResult result = plan(problem);
  check_plan(problem, result.plan);
  EXPECT_TRUE(holds(result.certificate, problem));
  EXPECT_EQ(result.per_rank[15].bytes.total(), 0);
  EXPECT_LT(result.gap(), 0.05);
  EXPECT_GE(result.gap(), 0);
}

TEST(PlannerTest, ProblemsSurviveJson) {
  Problem problem = small_problem();
  problem.rules["table_1"].cuts = {Cut::kRowWise};
  problem.rules["table_2"].ranks = {1, 2};
  problem.ranks[3].memory = 5e9;
  problem.tables[1].features = {{3, true, {{10, 5}}}, {1}};
  problem.tables[2].ids_below = {{7, 0.5}, {3000, 1}};
  const std::string text = to_json(problem);
  EXPECT_EQ(to_json(problem_from_json(text)), text);
}

TEST(PlannerTest, BadJsonIsNamedByPlace) {
  const auto refusal = [](const std::string& text) -> std::string {
    try {
      problem_from_json(text);
    } catch (const PlanError& error) {
      EXPECT_EQ(error.kind(), PlanErrorKind::kBadProblem);
      return error.what();
    }
    return "";
  };
  const std::string end = R"(, "batch": 1, "ranks": [{}]})";
  const std::string table = R"({"name": "a", "rows": 1, "dim": 4)";
  EXPECT_EQ(refusal("{"), "plan: the problem is not JSON at byte 2");
  EXPECT_EQ(refusal("[]"), "plan: / is not an object");
  EXPECT_EQ(refusal(R"({"tables": [], "tables": []})"),
            "plan: the problem has the key 'tables' twice");
  EXPECT_EQ(refusal(R"({"tables": [{"name": "a", "rows": 0, "dim": 4}])" + end),
            "plan: /tables/0/rows is 0, which is no whole number from 1 to 17592186044416");
  EXPECT_EQ(refusal(R"({"tables": [)" + table + R"(, "element_bytes": -1}])" + end),
            "plan: /tables/0/element_bytes is -1, which is no number from 0.25 to 16.0");
  EXPECT_EQ(refusal(R"({"tables": [)" + table + R"(, "ids_below": [[1, 0.5, 2]]}])" + end),
            "plan: /tables/0/ids_below/0 is not [row, share of the ids below it]");
  EXPECT_NE(refusal(R"({"tables": [)" + table + R"(, "elements": 1}])" + end)
                .find("/tables/0 has an unknown key 'elements'; there are name, rows"),
            std::string::npos);
  EXPECT_EQ(refusal(R"({"tables": [)" + table + "}," + table + "}]" + end),
            "plan: there are two tables 'a'");
  EXPECT_EQ(refusal(R"({"tables": [)" + table + R"(}], "rules": {"b": {}})" + end),
            "plan: there are rules for 'b', which is no table");
  EXPECT_EQ(refusal(R"({"tables": [)" + table + R"(}], "rules": {"a": {"cuts": ["no"]}})" + end),
            "plan: /rules/a/cuts/0 is \"no\", which is unknown");
  EXPECT_EQ(refusal(R"({"tables": [)" + table + R"(, "state_bytes_per_row": 1e999}])" + end),
            "plan: the problem has a number that is too large");
  EXPECT_EQ(refusal(std::string(100, '[')), "plan: the problem is nested deeper than 32");
}

// Bytes changed, doubled or left out: refused with words, or read; never a crash.
TEST(PlannerTest, DamagedJsonIsRefusedOrRead) {
  Problem problem = small_problem();
  problem.rules["table_1"].cuts = {Cut::kRowWise};
  problem.rules["table_2"].ranks = {1, 2};
  const std::string texts[] = {to_json(problem), to_json(problem, plan(problem))};
  std::uint64_t state = 88172645463325252ull;
  const auto below = [&](std::size_t limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<std::size_t>(state >> 11) % limit;
  };
  int num_refused = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string text = texts[i % 2];
    for (std::size_t n = 1 + below(3); n > 0; --n) {
      const std::size_t place = below(text.size());
      const std::size_t kind = below(4);
      if (kind == 0) text.erase(place, 1 + below(20));
      if (kind == 1) text[place] = static_cast<char>(below(256));
      if (kind == 2) text.insert(place, text.substr(below(text.size()), below(30)));
      if (kind == 3) text[place] = "0123456789-.e\"{}[],:"[below(20)];
      if (text.empty()) text = "{";
    }
    try {
      if (i % 2 == 0) {
        problem_from_json(text);
      } else {
        result_from_json(text);
      }
    } catch (const PlanError& error) {
      EXPECT_EQ(error.kind(), PlanErrorKind::kBadProblem);
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, 1000);
}

TEST(PlannerTest, ResultsSurviveJson) {
  const Problem problem = models::problem_of("tiny", 8, true);
  const PlanResult result = plan(problem);
  const PlanResult read = result_from_json(to_json(problem, result));
  check_plan(problem, read.plan);
  EXPECT_TRUE(holds(read.certificate, problem));
  ASSERT_EQ(read.plan.size(), result.plan.size());
  for (std::size_t t = 0; t < read.plan.size(); ++t) {
    EXPECT_EQ(read.plan[t].shards, result.plan[t].shards);
  }
}

// Of a file alone, without planning again: what is told of it is what was told of the plan.
TEST(PlannerTest, ResultsAreExplainedFromTheirFiles) {
  for (const Objective objective : {Objective::kSum, Objective::kPhases}) {
    Problem problem = models::problem_of("tiny", 8, true);
    problem.objective = objective;
    const PlanResult result = plan(problem);
    const std::string text = to_json(problem, result);
    const PlanResult read = result_from_json(text, problem);
    EXPECT_EQ(to_json(problem, read), text);
    EXPECT_EQ(summary(problem, read), summary(problem, result));
    EXPECT_EQ(table_text(problem, read), table_text(problem, result));
    for (const Table& table : problem.tables) {
      EXPECT_EQ(explain(problem, read, table.name), explain(problem, result, table.name));
    }
    problem.tables[3].name = "other";
    EXPECT_THROW(result_from_json(text, problem), PlanError);
  }
}

// A clock that is a count, so that nothing hangs on this machine's.
TEST(PlannerTest, TimeThatIsUpGivesTheBestSoFar) {
  const Problem problem = models::problem_of("tiny", 16, true);
  const PlanResult whole = plan(problem);
  EXPECT_FALSE(whole.is_cut_short);
  EXPECT_EQ(to_json(problem, whole).find("cut_short"), std::string::npos);
  double last = kNoLimit;
  for (const int most : {0, 3, 40, 1'000'000}) {
    int asked = 0;
    const PlanResult result = plan(problem, [&] { return ++asked > most; });
    SCOPED_TRACE(most);
    EXPECT_NO_THROW(check_plan(problem, result.plan));
    EXPECT_TRUE(holds(result.certificate, problem));
    EXPECT_LE(result.seconds, last);
    last = result.seconds;
    const bool is_cut = most < 1'000'000;
    EXPECT_EQ(result.is_cut_short, is_cut);
    EXPECT_EQ(summary(problem, result).find("; cut short\n") != std::string::npos, is_cut);
    const std::string text = to_json(problem, result);
    EXPECT_EQ(result_from_json(text).is_cut_short, is_cut);
    EXPECT_EQ(text == to_json(problem, whole), !is_cut);
    EXPECT_EQ(result.tries == 1, most == 0);
  }
}

TEST(PlannerTest, TimeThatIsUpBeforeThereIsAPlanIsNamed) {
  // So little memory that the first try does not fit.
  const Problem problem = models::problem_of("medium", 16, false, 1.002);
  try {
    plan(problem, [] { return true; });
    FAIL();
  } catch (const PlanError& error) {
    EXPECT_EQ(error.kind(), PlanErrorKind::kLate);
    EXPECT_STREQ(error.what(),
                 "plan: no plan was found in the time that was given\n"
                 "1 were tried, and none of them fits\ntry: more time, or more memory");
  }
}

TEST(PlannerTest, PlansThatAreWrongAreNamed) {
  Problem problem = small_problem();
  const Plan good = plan(problem).plan;
  const auto refusal = [&](const Plan& plan) -> std::string {
    try {
      check_plan(problem, plan);
    } catch (const PlanError& error) {
      return error.what();
    }
    return "";
  };
  Plan bad = good;
  bad.pop_back();
  EXPECT_EQ(refusal(bad), "plan: table 'table_5' is missing");
  bad = good;
  bad[1] = bad[0];
  EXPECT_EQ(refusal(bad), "plan: table 'table_0' is not there, or is twice in it");
  bad = good;
  bad[0] = {"table_0", Cut::kTableWise, Kernel::kFused, {{0, 0, 1000, 12, 0}}};
  EXPECT_EQ(refusal(bad), "plan: table 'table_0' is not covered by its shards");
  bad[0].shards = {{0, 0, 1000, 16, 4}};
  EXPECT_EQ(refusal(bad), "plan: table 'table_0' has a shard that lies outside it, or on no rank");
  // Shards that lie otherwise would not cost what their cut does: four ranks, two hosts.
  const std::vector<Shard> columns{{0, 0, 1000, 8, 0}, {0, 8, 1000, 8, 2}};
  const std::vector<Shard> rows{{0, 0, 500, 16, 1}, {500, 0, 500, 16, 2}};
  const std::vector<Shard> host{{0, 0, 500, 16, 2}, {500, 0, 500, 16, 3}};
  const std::vector<Shard> all{
      {0, 0, 250, 16, 0}, {250, 0, 250, 16, 1}, {500, 0, 250, 16, 2}, {750, 0, 250, 16, 3}};
  for (const auto& [cut, shards, is_right] : {std::tuple{Cut::kTableWise, columns, false},
                                              {Cut::kTableColumnWise, columns, false},
                                              {Cut::kGrid, columns, false},
                                              {Cut::kColumnWise, columns, true},
                                              {Cut::kTableRowWise, rows, false},
                                              {Cut::kGrid, rows, false},
                                              {Cut::kRowWise, rows, false},
                                              {Cut::kTableRowWise, host, true},
                                              {Cut::kGrid, host, true},
                                              {Cut::kRowWise, host, false},
                                              {Cut::kRowWise, all, true},
                                              {Cut::kTableRowWise, all, false},
                                              {Cut::kColumnWise, all, false}}) {
    bad[0] = {"table_0", cut, Kernel::kFused, shards};
    const std::string name(name_of(cut));
    EXPECT_EQ(
        refusal(bad),
        is_right ? "" : "plan: table 'table_0' has shards that do not lie as " + name + " has them")
        << name << " " << shards.size();
  }
  bad[0] = {"table_0", Cut::kColumnWise, Kernel::kFused, columns};
  // Parts of columns may meet on a rank; rows are in the order of the ranks.
  bad[0].shards[1].rank = 0;
  EXPECT_EQ(refusal(bad), "");
  bad[0] = {"table_0", Cut::kTableRowWise, Kernel::kFused, host};
  std::swap(bad[0].shards[0].rank, bad[0].shards[1].rank);
  EXPECT_EQ(refusal(bad),
            "plan: table 'table_0' has shards that do not lie as table_row_wise has them");
  // Parts that no bound is about: narrower than units, or of a kernel that shards do not have.
  bad[0] = {"table_0", Cut::kColumnWise, Kernel::kFused, {{0, 0, 1000, 6, 0}, {0, 6, 1000, 10, 2}}};
  EXPECT_EQ(refusal(bad),
            "plan: table 'table_0' has a part of 6 columns, and parts are multiples of 4");
  bad[0].shards = {{0, 0, 1000, 4, 0}, {0, 4, 1000, 12, 2}};
  EXPECT_EQ(refusal(bad), "");
  problem.rules["table_0"].min_columns = 5;
  EXPECT_EQ(refusal(bad),
            "plan: table 'table_0' has a part of 4 columns, and parts are multiples of 8");
  bad[0] = {"table_0", Cut::kRowWise, Kernel::kFused, all};
  EXPECT_EQ(refusal(bad), "");
  bad[0].kernel = Kernel::kDense;
  EXPECT_EQ(refusal(bad),
            "plan: table 'table_0' is row_wise with a dense kernel, which only data_parallel has");
}

TEST(PlannerTest, UnitsAreDivisorsOfTheWidth) {
  EXPECT_EQ(unit_of(128, 0), 4);
  EXPECT_EQ(unit_of(10, 0), 5);
  EXPECT_EQ(unit_of(128, 24), 32);
  EXPECT_EQ(unit_of(7, 0), 7);
  EXPECT_EQ(unit_of(2, 0), 2);
  EXPECT_EQ(unit_of(16, 20), 16);
}

TEST(PlannerTest, LinesAreAtMostATerminalWide) {
  Problem problem = models::problem_of("small", 64, false);
  problem.tables[3].name = std::string(200, 'x');
  const PlanResult result = plan(problem);
  std::string text = table_text(problem, result) + summary(problem, result);
  for (const Table& table : problem.tables) text += explain(problem, result, table.name);
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = text.find('\n', begin);
    EXPECT_LE(end - begin, 100u) << text.substr(begin, end - begin);
    begin = end + 1;
  }
}

}  // namespace
}  // namespace tessera::planner
