// Metrics against closed forms and a count over all pairs.

#include "dlrm/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>

namespace {

using namespace tessera::workloads::dlrm;

double auc_of_all_pairs(const std::vector<float>& scores, const std::vector<float>& labels) {
  double pairs = 0;
  double ordered = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    for (std::size_t j = 0; j < scores.size(); ++j) {
      if (labels[i] != 1 || labels[j] != 0) continue;
      pairs += 1;
      ordered += scores[i] > scores[j] ? 1 : scores[i] == scores[j] ? 0.5 : 0;
    }
  }
  return ordered / pairs;
}

struct Sample {
  std::vector<float> logits;
  std::vector<float> labels;
};

// Scores on a grid, so that there are ties.
Sample make_sample(std::size_t count, double step, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Sample sample;
  for (std::size_t i = 0; i < count; ++i) {
    const float label = random() % 3 == 0 ? 1.0F : 0.0F;
    const double score = normal(random) + label;
    sample.logits.push_back(static_cast<float>(step > 0 ? std::round(score / step) * step : score));
    sample.labels.push_back(label);
  }
  return sample;
}

TEST(Auc, KnownValues) {
  EXPECT_EQ(exact_auc(std::vector<float>{1, 2, 3, 4}, std::vector<float>{0, 0, 1, 1}), 1);
  EXPECT_EQ(exact_auc(std::vector<float>{1, 2, 3, 4}, std::vector<float>{1, 1, 0, 0}), 0);
  EXPECT_EQ(exact_auc(std::vector<float>{2, 2, 2, 2}, std::vector<float>{1, 0, 1, 0}), 0.5);
  // Pairs (click, other): 0.35 above 0.1; 0.8 above both; 0.35 below 0.4.
  EXPECT_EQ(exact_auc(std::vector<float>{0.1F, 0.4F, 0.35F, 0.8F}, std::vector<float>{0, 0, 1, 1}),
            0.75);
  EXPECT_EQ(exact_auc(std::vector<float>{-0.0F, 0.0F}, std::vector<float>{1, 0}), 0.5);
  EXPECT_EQ(exact_auc(std::vector<float>{-1.0F, -2.0F, 3.0F}, std::vector<float>{1, 0, 1}), 1);
}

TEST(Auc, NeedsBothLabels) {
  EXPECT_TRUE(std::isnan(exact_auc({}, {})));
  EXPECT_TRUE(std::isnan(exact_auc(std::vector<float>{1, 2}, std::vector<float>{1, 1})));
  EXPECT_TRUE(std::isnan(exact_auc(std::vector<float>{1, 2}, std::vector<float>{0, 0})));
}

TEST(Auc, EqualsTheCountOverAllPairs) {
  for (const double step : {0.0, 0.01, 0.5, 2.0}) {
    const Sample sample = make_sample(700, step, 3);
    EXPECT_DOUBLE_EQ(exact_auc(sample.logits, sample.labels),
                     auc_of_all_pairs(sample.logits, sample.labels));
  }
}

TEST(Auc, RefusesWhatIsNoNumber) {
  const std::vector<float> labels = {0, 1};
  EXPECT_THROW((void)exact_auc(std::vector<float>{1, NAN}, labels), std::invalid_argument);
  try {
    (void)exact_auc(std::vector<float>{1}, labels);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "auc: 1 predictions and 2 labels were given.");
  }
}

TEST(Calibration, PartsAreByPredictionAndAddUp) {
  // Chances 0.5 and about 0.731, in no order; of the larger ones two of three were clicks.
  const std::vector<float> logits{1, 0, 1, 0, 0, 1};
  const std::vector<float> labels{1, 0, 0, 1, 0, 1};
  const auto parts = calibration_parts(logits, labels, 2);
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_DOUBLE_EQ(parts[0].predicted, 0.5);
  EXPECT_DOUBLE_EQ(parts[0].observed, 1.0 / 3);
  EXPECT_DOUBLE_EQ(parts[1].predicted, 1 / (1 + std::exp(-1.0)));
  EXPECT_DOUBLE_EQ(parts[1].observed, 2.0 / 3);
  EXPECT_EQ(parts[0].num_samples + parts[1].num_samples, 6);
  EXPECT_EQ(calibration_parts(logits, labels, 10).size(), 6U);  // as many as there are samples
  EXPECT_TRUE(calibration_parts({}, {}, 10).empty());
  EXPECT_THROW(calibration_parts(logits, {}, 2), std::invalid_argument);
}

TEST(StreamingAuc, IsOffByAtMostItsError) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    const Sample sample = make_sample(20000, 0, seed);
    StreamingAuc streaming;
    streaming.add(sample.logits, sample.labels);
    const double exact = exact_auc(sample.logits, sample.labels);
    EXPECT_LE(std::abs(streaming.value() - exact), streaming.error());
    EXPECT_LT(streaming.error(), 1e-3);
  }
}

TEST(StreamingAuc, OneBinIsAllTies) {
  StreamingAuc streaming;
  streaming.add(std::vector<float>{100, 200, 300, 400}, std::vector<float>{0, 1, 0, 1});
  EXPECT_EQ(streaming.value(), 0.5);
  EXPECT_EQ(streaming.error(), 0.5);
  streaming.clear();
  EXPECT_TRUE(std::isnan(streaming.value()));
  EXPECT_TRUE(std::isnan(streaming.error()));
}

TEST(StreamingAuc, RefusesWhatIsNoNumber) {
  StreamingAuc streaming;
  EXPECT_THROW(streaming.add(std::vector<float>{NAN}, std::vector<float>{0}),
               std::invalid_argument);
}

TEST(ClickSums, LogLossOfKnownChances) {
  ClickSums sums;
  const auto logit = [](double p) { return static_cast<float>(std::log(p / (1 - p))); };
  sums.add(std::vector<float>{logit(0.9), logit(0.2), logit(0.5)}, std::vector<float>{1, 0, 1});
  EXPECT_NEAR(sums.log_loss(), -(std::log(0.9) + std::log(0.8) + std::log(0.5)) / 3, 1e-7);
  EXPECT_NEAR(sums.calibration(), (0.9 + 0.2 + 0.5) / 2, 1e-7);
  const double entropy = -(2. / 3 * std::log(2. / 3) + 1. / 3 * std::log(1. / 3));
  EXPECT_NEAR(sums.normalised_entropy(), sums.log_loss() / entropy, 1e-12);
}

TEST(ClickSums, KnowingTheRateAloneIsOne) {
  ClickSums sums;
  const auto logit = static_cast<float>(std::log(0.25 / 0.75));
  for (int i = 0; i < 100; ++i) {
    sums.add(std::vector<float>{logit}, std::vector<float>{i % 4 == 0 ? 1.0F : 0.0F});
  }
  EXPECT_NEAR(sums.normalised_entropy(), 1, 1e-7);
  EXPECT_NEAR(sums.calibration(), 1, 1e-7);
}

TEST(ClickSums, ExtremeLogitsStayFinite) {
  ClickSums sums;
  sums.add(std::vector<float>{1000, -1000, INFINITY}, std::vector<float>{0, 1, 0});
  EXPECT_EQ(sums.log_loss(), 100);
  ClickSums good;
  good.add(std::vector<float>{1000, -1000}, std::vector<float>{1, 0});
  EXPECT_EQ(good.log_loss(), 0);
  EXPECT_THROW(good.add(std::vector<float>{NAN}, std::vector<float>{1}), std::invalid_argument);
}

TEST(ClickSums, EmptyHasNoValue) {
  const ClickSums sums;
  EXPECT_TRUE(std::isnan(sums.log_loss()));
  EXPECT_TRUE(std::isnan(sums.normalised_entropy()));
  EXPECT_TRUE(std::isnan(sums.calibration()));
}

TEST(Metrics, MergingPartsIsExact) {
  const Sample sample = make_sample(1000, 0, 9);
  ClickSums whole;
  whole.add(sample.logits, sample.labels);
  StreamingAuc whole_auc;
  whole_auc.add(sample.logits, sample.labels);
  for (const std::size_t parts : {2U, 3U, 7U}) {
    ClickSums merged;
    StreamingAuc merged_auc;
    for (std::size_t part = parts; part-- > 0;) {  // another order, too
      const std::size_t begin = 1000 * part / parts;
      const std::size_t count = 1000 * (part + 1) / parts - begin;
      ClickSums sums;
      StreamingAuc auc;
      sums.add(std::span(sample.logits).subspan(begin, count),
               std::span(sample.labels).subspan(begin, count));
      auc.add(std::span(sample.logits).subspan(begin, count),
              std::span(sample.labels).subspan(begin, count));
      merged.merge(sums);
      merged_auc.merge(auc);
    }
    EXPECT_TRUE(std::ranges::equal(merged.words(), whole.words()));
    EXPECT_TRUE(std::ranges::equal(merged_auc.words(), whole_auc.words()));
    EXPECT_EQ(merged.log_loss(), whole.log_loss());
  }
}

}  // namespace
