// Statistics of ids: what is counted, and what a law that is known must give.

#include <cmath>

#include <gtest/gtest.h>

#include "tessera/planner/cost.h"
#include "tessera/planner/id_statistics.h"
#include "tessera/planner/plan_error.h"

namespace tessera::planner {
namespace {

// Draws by the sums of r^-exponent, with a generator of its own.
class Law {
 public:
  Law(std::int64_t rows, double exponent) {
    double sum = 0;
    for (std::int64_t r = 1; r <= rows; ++r) {
      shares_.push_back(std::pow(static_cast<double>(r), -exponent));
      sum += shares_.back();
    }
    double below = 0;
    for (double& share : shares_) {
      share /= sum;
      below += share;
      below_.push_back(below);
    }
  }
  std::int64_t draw() {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    const double u = static_cast<double>(state_ >> 11) * 0x1p-53;
    const auto found = std::lower_bound(below_.begin(), below_.end(), u);
    return std::min<std::int64_t>(found - below_.begin(),
                                  static_cast<std::int64_t>(below_.size()) - 1);
  }
  // Share of the draws that are of rows below `row`, and of the hotter row beside it.
  double below(std::int64_t row) const {
    return row == 0 ? 0 : below_[static_cast<std::size_t>(row) - 1];
  }
  double share_near(std::int64_t row) const {
    return shares_[static_cast<std::size_t>(std::max<std::int64_t>(1, row)) - 1];
  }
  // Distinct ids among so many draws, in the mean.
  double distinct(double draws) const {
    double sum = 0;
    for (const double share : shares_) sum += -std::expm1(draws * std::log1p(-share));
    return sum;
  }

 private:
  std::vector<double> shares_;
  std::vector<double> below_;
  std::uint64_t state_ = 1;
};

TEST(StatisticsTest, SamplesAreCounted) {
  IdCounter counter("a", 10);
  const std::int64_t ids[] = {0, 1, 1, 9};
  counter.add(ids, 4);
  counter.add(ids, 0);
  counter.add(ids + 1, 2);
  counter.add(ids, 1);
  const IdStatistics found = counter.finish();
  EXPECT_EQ(found.samples, 4);
  EXPECT_EQ(found.ids, 7);
  EXPECT_EQ(found.mean, 1.75);
  EXPECT_EQ(found.median, 1);
  EXPECT_EQ(found.most, 4);
  EXPECT_EQ(found.empty_share, 0.25);
  EXPECT_EQ(found.distinct, 3);
  EXPECT_EQ(found.hottest[0], (std::pair<std::int64_t, double>{1, 4}));
  EXPECT_EQ(found.ranges, (std::vector<double>{2, 4, 0, 0, 0, 0, 0, 0, 0, 1}));
  EXPECT_DOUBLE_EQ(found.hotness[1].second, 6.0 / 7);
  EXPECT_EQ(found.curve, (std::vector<std::pair<double, double>>{{7, 3}}));
}

TEST(StatisticsTest, CurvesOfKnownLaws) {
  constexpr std::int64_t kRows = 200'000;
  constexpr std::int64_t kDraws = 1 << 19;
  for (const double exponent : {0.8, 1.05, 1.2}) {
    Law law(kRows, exponent);
    IdCounter counter("a", kRows);
    for (std::int64_t i = 0; i < kDraws; i += 4) {
      const std::int64_t ids[] = {law.draw(), law.draw(), law.draw(), law.draw()};
      counter.add(ids, 4);
    }
    const IdStatistics found = counter.finish();
    EXPECT_NEAR(found.zipf, exponent, 0.03 + 3 * found.zipf_error);
    for (const auto& [lookups, distinct] : found.curve) {
      if (lookups < 4096) continue;  // chance rules
      EXPECT_NEAR(distinct / law.distinct(lookups), 1, 0.02) << exponent << " " << lookups;
    }
    // And so the planner counts the rows that a step touches, between the points too.
    Problem problem;
    Table table;
    table.name = "a";
    table.rows = kRows;
    table.dim = 4;
    problem.tables = {table};
    ASSERT_EQ(apply({found}, problem.tables), 1);
    EXPECT_EQ(problem.tables[0].features[0].ids, 4);
    for (const std::int64_t batch : {1500, 3000, 6000, 11'500, 23'000, 25'000, 46'000, 92'000}) {
      problem.batch = batch;
      const double share = CostModel(problem).load_of(problem.tables[0]).touched;
      const double lookups = 4.0 * static_cast<double>(batch);
      EXPECT_NEAR(share * kRows / law.distinct(lookups), 1, 0.02) << exponent << " " << lookups;
    }
    problem.batch = 25'000;
    const CostModel model(problem);
    // Rows are cut where ranks get the same share of the ids, as nearly as whole rows allow.
    const Table& counted = problem.tables[0];
    for (const int ranks : {2, 4, 16}) {
      std::int64_t row = 0;
      int number = 0;
      for (const std::int64_t rows : rows_of_equal_load(counted, ranks)) {
        row += rows;
        const double wanted = static_cast<double>(++number) / ranks;
        EXPECT_NEAR(law.below(row), wanted, 0.025 / ranks + law.share_near(row) / 2)
            << exponent << ": " << row << " of " << ranks << " ranks";
      }
      EXPECT_EQ(row, kRows);
    }
    // Ids taken to be even would touch far more.
    EXPECT_GT(model.load_of(table).touched * kRows, 20'000);
  }
}

TEST(StatisticsTest, BeyondAMillionIdsAreEstimated) {
  IdCounter counter("a", std::int64_t{1} << 40);
  constexpr std::int64_t kCount = 3'000'000;
  for (std::int64_t i = 0; i < kCount; ++i) {
    const std::int64_t id = i * 104'729;
    counter.add(&id, 1);
  }
  const IdStatistics found = counter.finish();
  EXPECT_NEAR(found.distinct / kCount, 1, 0.03);
  EXPECT_EQ(found.curve[23].first, 3 << 18);
  EXPECT_EQ(found.curve[24].first, 1 << 20);
  EXPECT_EQ(found.curve[24].second, 1 << 20);
}

TEST(StatisticsTest, FilesAreReadAsWritten) {
  IdCounter counter("a", 50);
  for (std::int64_t i = 0; i < 1000; ++i) {
    const std::int64_t id = i * i % 50;
    counter.add(&id, 1);
  }
  const std::string text = to_json(std::vector<IdStatistics>{counter.finish()});
  EXPECT_EQ(to_json(statistics_from_json(text)), text);
  const std::pair<std::string, std::string> kBad[] = {
      {"[]", "is not an object"},
      {"{}", "no file of tessera data stats"},
      {R"({"kind": "tessera id statistics", "features": [{"name": 3}]})", "/features/0"},
  };
  for (const auto& [bad, place] : kBad) {
    try {
      statistics_from_json(bad);
      ADD_FAILURE() << bad;
    } catch (const PlanError& error) {
      EXPECT_NE(std::string(error.what()).find(place), std::string::npos) << error.what();
    }
  }
  // Damaged anywhere: refused or read, never worse.
  for (std::size_t i = 0; i < text.size(); i += 7) {
    std::string damaged = text;
    damaged[i] = damaged[i] == '9' ? '-' : '9';
    try {
      statistics_from_json(damaged);
    } catch (const PlanError&) {
    }
  }
}

}  // namespace
}  // namespace tessera::planner
