// Every piece of advice about tables that do not fit all together helps whoever takes it.

#include <functional>
#include <map>

#include <gtest/gtest.h>

#include "planner/public_models.h"
#include "tessera/planner/planner.h"

namespace tessera::planner {
namespace {

// The pieces of advice of a refusal of kind kTooLarge, in order.
std::vector<std::string> advice_of(const Problem& problem) {
  std::string text;
  try {
    plan(problem);
    ADD_FAILURE() << "there is a plan";
  } catch (const PlanError& error) {
    EXPECT_EQ(error.kind(), PlanErrorKind::kTooLarge) << error.what();
    text = error.advice();
  }
  std::vector<std::string> pieces;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(", or "), text.size());
    pieces.push_back(text.substr(0, end));
    text = end == text.size() ? "" : text.substr(end + 5);
  }
  return pieces;
}

// The problem as it is after a piece of advice.
Problem taken(Problem problem, const std::string& advice) {
  const double number = std::strtod(advice.c_str(), nullptr);
  if (advice.ends_with(" ranks")) {
    problem.ranks.assign(static_cast<std::size_t>(number), problem.ranks[0]);
  } else if (advice.ends_with(" GB a rank")) {
    for (Rank& rank : problem.ranks) rank.memory = number * 1e9;
  } else if (advice == "rows of 2 bytes a number") {
    for (Table& table : problem.tables) table.element_bytes = 2;
  } else if (advice.starts_with("a reservation of ")) {
    problem.reserved_percent = std::stod(advice.substr(17));
  } else if (advice == "no rules") {
    problem.rules.clear();
    problem.apart.clear();
    problem.together.clear();
  } else {
    ADD_FAILURE() << "unknown advice: " << advice;
  }
  return problem;
}

void expect_every_piece_helps(const Problem& problem, const std::vector<std::string>& wanted) {
  const std::vector<std::string> pieces = advice_of(problem);
  ASSERT_EQ(pieces.size(), wanted.size()) << ::testing::PrintToString(pieces);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_NE(pieces[i].find(wanted[i]), std::string::npos) << pieces[i];
    const Problem other = taken(problem, pieces[i]);
    try {
      EXPECT_NO_THROW(check_plan(other, plan(other).plan)) << pieces[i];
    } catch (const PlanError& error) {
      ADD_FAILURE() << pieces[i] << ": " << error.what();
    }
  }
}

TEST(AdviceTest, MoreOrSmallerOfEverythingHelps) {
  Problem problem = models::problem_of("medium", 8, false);
  for (Rank& rank : problem.ranks) rank.memory = 48e9;
  problem.reserved_percent = 50;
  expect_every_piece_helps(problem,
                           {" ranks", " GB a rank", "rows of 2 bytes", "a reservation of"});
}

TEST(AdviceTest, LeavingOutRulesHelps) {
  Problem problem = models::problem_of("medium", 8, false);
  // One host's worth of copies of what fits once.
  for (Rank& rank : problem.ranks) rank.memory = 40e9;
  for (const Table& table : problem.tables) {
    if (table.rows == 10'000'000) problem.rules[table.name].cuts = {Cut::kDataParallel};
  }
  const std::vector<std::string> pieces = advice_of(problem);
  ASSERT_FALSE(pieces.empty());
  EXPECT_EQ(pieces.back(), "no rules");
  expect_every_piece_helps(problem, pieces);
}

// Ranks are the fewest, memory and reservation nearly the least that help.
TEST(AdviceTest, NoMoreThanIsNeeded) {
  Problem problem = models::problem_of("medium", 8, false);
  for (Rank& rank : problem.ranks) rank.memory = 48e9;
  problem.reserved_percent = 50;
  for (const std::string& piece : advice_of(problem)) {
    Problem other = taken(problem, piece);
    if (piece.ends_with(" ranks")) {
      other.ranks.resize(other.ranks.size() - static_cast<std::size_t>(other.ranks_per_host));
    } else if (piece.ends_with(" a rank")) {
      for (Rank& rank : other.ranks) rank.memory *= 0.97;
    } else if (piece.starts_with("a reservation")) {
      other.reserved_percent += 2;
    } else {
      continue;
    }
    EXPECT_THROW(plan(other), PlanError) << piece;
  }
}

}  // namespace
}  // namespace tessera::planner
