// What is told of a plan, in words and as a picture: the same seconds that the plan is judged by.

#include "tessera/planner/explain.h"

#include <cstdio>

#include <gtest/gtest.h>

#include "plan_picture.h"

namespace tessera::planner {
namespace {

// One table cut by rows on four ranks, three of which have the 1,000 rows that most ids are of.
Problem hot_problem() {
  Problem problem;
  Table& table = problem.tables.emplace_back();
  table.name = "hot";
  table.rows = 1'000'000;
  table.dim = 16;
  table.features = {{20}};
  table.ids_below = {{1000, 0.75}, {1e6, 1}};
  problem.rules[table.name].cuts = {Cut::kRowWise};
  problem.ranks.assign(4, {});
  problem.ranks_per_host = 2;
  return problem;
}

double after(const std::string& text, const std::string& words) {
  const std::size_t place = text.find(words);
  EXPECT_NE(place, std::string::npos) << words << " in\n" << text;
  return place == std::string::npos ? 0 : std::stod(text.substr(place + words.size()));
}

// Shards of rows that are asked for less are told with less.
TEST(ExplainTest, PartsOfTheOnlyTableAreThoseOfTheRanks) {
  const Problem problem = hot_problem();
  const PlanResult result = plan(problem);
  ASSERT_NE(result.plan[0].shards[1].rows, 250'000);
  Seconds sum;
  double bytes = 0;
  for (const ShardCost& cost : result.per_rank) {
    sum.ids += cost.seconds.ids;
    sum.lookup += cost.seconds.lookup;
    sum.rows += cost.seconds.rows + cost.seconds.gradients;
    sum.step += cost.seconds.step;
    bytes += cost.bytes.total();
  }
  const std::string text = explain(problem, result, "hot");
  const auto near = [&](const std::string& words, double seconds) {
    const double unit =
        text.find(" us", text.find(words)) < text.find(" ms", text.find(words)) ? 1e-6 : 1e-3;
    EXPECT_NEAR(after(text, words) * unit, seconds, 1e-3 * seconds) << words << "in\n" << text;
  };
  near("costs  ", sum.total());
  near("ranks: ids ", sum.ids);
  near(", lookup ", sum.lookup);
  near(", rows ", sum.rows);
  near(", step ", sum.step);
  EXPECT_NE(text.find(bytes_text(bytes) + " in all"), std::string::npos) << text;
  EXPECT_EQ(after(text, "its largest shard needs "), 1) << text;
}

// The only table is drawn on every rank as dark as the rank's seconds.
TEST(ExplainTest, APictureHasTheSecondsOfTheRanks) {
  const Problem problem = hot_problem();
  PlanResult result = plan(problem);
  // Uneven on purpose: half of the hot rows, the other half, and the rest by two.
  result.plan[0].shards = {{0, 0, 500, 16, 0},
                           {500, 0, 500, 16, 1},
                           {1000, 0, 499'000, 16, 2},
                           {500'000, 0, 500'000, 16, 3}};
  result.per_rank = cost_of(problem, result.plan);
  const std::string text = cli::plan_picture(problem, result);
  double most = 0;
  for (const ShardCost& cost : result.per_rank) most = std::max(most, cost.seconds.total());
  std::size_t place = text.find(">hot<");
  ASSERT_NE(place, std::string::npos) << text;
  for (const ShardCost& cost : result.per_rank) {
    place = text.find("fill-opacity=\"", place + 1);
    ASSERT_NE(place, std::string::npos);
    EXPECT_NEAR(std::stod(text.substr(place + 14)), 0.15 + 0.85 * cost.seconds.total() / most,
                1e-3);
  }
}

}  // namespace
}  // namespace tessera::planner
