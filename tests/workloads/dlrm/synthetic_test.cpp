// The synthetic click log: it is what its options say, and its ceiling is one.

#include "dlrm/synthetic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "dlrm/metrics.h"

namespace {

using namespace tessera::workloads::dlrm;

SyntheticOptions small_options() {
  SyntheticOptions options;
  options.schema = {5, {{"one", 50, 1}, {"three", 1000, 3}, {"any", 7, 0}, {"single", 1, 1}}};
  return options;
}

// The bag of a feature of a sample.
std::vector<std::int64_t> bag(const SampleBlock& block, std::int64_t feature, std::int64_t sample) {
  const auto at = static_cast<std::ptrdiff_t>(feature * block.num_samples + sample);
  const auto begin =
      std::accumulate(block.lengths.begin(), block.lengths.begin() + at, std::ptrdiff_t{0});
  return {block.ids.begin() + begin,
          block.ids.begin() + begin + block.lengths[static_cast<std::size_t>(at)]};
}

TEST(Synthetic, SampleIsAFunctionOfItsNumber) {
  const SyntheticLog log(small_options());
  SampleBlock whole;
  log.read(1000, 700, whole);  // more than one chunk inside
  SampleBlock part;
  for (const auto& [first, count] : {std::pair{1000, 1}, {1255, 2}, {1400, 300}}) {
    log.read(first, count, part);
    for (std::int64_t s = 0; s < count; ++s) {
      const std::int64_t in_whole = first - 1000 + s;
      EXPECT_EQ(part.labels[static_cast<std::size_t>(s)],
                whole.labels[static_cast<std::size_t>(in_whole)]);
      for (std::int64_t d = 0; d < 5; ++d) {
        EXPECT_EQ(part.dense[static_cast<std::size_t>(s * 5 + d)],
                  whole.dense[static_cast<std::size_t>(in_whole * 5 + d)]);
      }
      for (std::int64_t f = 0; f < 4; ++f) EXPECT_EQ(bag(part, f, s), bag(whole, f, in_whole));
    }
  }
}

TEST(Synthetic, FollowsTheSchema) {
  const SyntheticLog log(small_options());
  SampleBlock block;
  log.read(0, 2000, block);
  ASSERT_EQ(block.num_samples, 2000);
  ASSERT_EQ(block.lengths.size(), 8000U);
  std::set<std::int32_t> sizes;
  std::int64_t at = 0;
  for (std::int64_t f = 0; f < 4; ++f) {
    const Feature& feature = log.schema().features[static_cast<std::size_t>(f)];
    for (std::int64_t s = 0; s < 2000; ++s) {
      const std::int32_t length = block.lengths[static_cast<std::size_t>(f * 2000 + s)];
      if (feature.bag_size > 0) {
        ASSERT_EQ(length, feature.bag_size);
      } else {
        sizes.insert(length);
      }
      for (std::int32_t k = 0; k < length; ++k) {
        const std::int64_t id = block.ids[static_cast<std::size_t>(at++)];
        ASSERT_TRUE(id >= 0 && id < feature.num_rows);
      }
    }
  }
  EXPECT_EQ(at, static_cast<std::int64_t>(block.ids.size()));
  EXPECT_EQ(sizes, (std::set<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
}

TEST(Synthetic, OtherSeedsGiveOtherSamples) {
  SyntheticOptions options = small_options();
  SampleBlock first;
  SyntheticLog(options).read(0, 100, first);
  options.seed = 2;
  SampleBlock second;
  SyntheticLog(options).read(0, 100, second);
  EXPECT_NE(first.ids, second.ids);
  EXPECT_NE(first.dense, second.dense);
}

TEST(Synthetic, IdsFollowTheZipfLaw) {
  constexpr std::int64_t kRows = 1000;
  constexpr std::int64_t kSamples = 200000;
  for (const double exponent : {0.0, 0.7, 1.0, 1.3}) {
    SyntheticOptions options;
    options.schema = {0, equal_features(1, kRows)};
    options.zipf_exponent = exponent;
    SampleBlock block;
    SyntheticLog(options).read(0, kSamples, block);
    std::vector<double> counts(kRows);
    for (const std::int64_t id : block.ids) counts[static_cast<std::size_t>(id)] += 1;
    std::ranges::sort(counts, std::greater<>());
    const auto below = [&](double x) {
      if (exponent == 1) return std::log(x);
      return (std::pow(x, 1 - exponent) - 1) / (1 - exponent);
    };
    // The ten most popular ids one by one (sorting biases the others), and the upper half.
    double head = 0;
    for (std::int64_t k = 0; k < kRows / 2; ++k) {
      const auto x = static_cast<double>(k + 1);
      const double expected = kSamples * (below(x + 1) - below(x)) / below(kRows + 1);
      head += counts[static_cast<std::size_t>(k)];
      if (exponent >= 0.7 && k < 10) {
        EXPECT_NEAR(counts[static_cast<std::size_t>(k)], expected, 5 * std::sqrt(expected))
            << exponent << " " << k;
      }
    }
    if (exponent >= 0.7) {
      const double expected = kSamples * below(kRows / 2 + 1.0) / below(kRows + 1);
      EXPECT_NEAR(head, expected, 0.03 * kSamples) << exponent;
    } else {
      EXPECT_NEAR(counts.front(), kSamples / kRows, 5 * std::sqrt(kSamples / kRows));
    }
  }
}

TEST(Synthetic, PopularRowsAreScattered) {
  SyntheticOptions options;
  options.schema = {0, equal_features(1, 10000)};
  SampleBlock block;
  SyntheticLog(options).read(0, 20000, block);
  std::map<std::int64_t, int> by_part;  // tenths of the table
  for (const std::int64_t id : block.ids) by_part[id / 1000] += 1;
  EXPECT_EQ(by_part.size(), 10U);
  for (const auto& [part, count] : by_part) EXPECT_GT(count, 200);
}

TEST(Synthetic, LabelsAreDrawnWithTheTrueChances) {
  SyntheticOptions options;
  options.schema = {13, equal_features(8, 500)};
  const SyntheticLog log(options);
  constexpr std::int64_t kSamples = 100000;
  SampleBlock block;
  log.read(0, kSamples, block);
  std::vector<float> chances(kSamples);
  log.chances(0, chances);
  // In every tenth of the chances, the click rate is their mean.
  std::array<double, 10> expected{};
  std::array<double, 10> variance{};
  std::array<double, 10> clicks{};
  for (std::size_t i = 0; i < kSamples; ++i) {
    const auto tenth = std::min<std::size_t>(9, static_cast<std::size_t>(chances[i] * 10));
    expected[tenth] += chances[i];
    variance[tenth] += chances[i] * (1 - chances[i]);
    clicks[tenth] += block.labels[i];
  }
  for (std::size_t t = 0; t < 10; ++t) {
    EXPECT_NEAR(clicks[t], expected[t], 4.5 * std::sqrt(variance[t]) + 1) << t;
  }
}

TEST(Synthetic, CeilingIsWhatTheTrueChancesReach) {
  SyntheticOptions options;
  options.schema = {13, equal_features(8, 500)};
  const SyntheticLog log(options);
  constexpr std::int64_t kSamples = 200000;
  SampleBlock block;
  log.read(0, kSamples, block);
  std::vector<float> logits(kSamples);
  log.chances(0, logits);
  for (float& p : logits) p = std::log(p / (1 - p));
  ClickSums sums;
  sums.add(logits, block.labels);
  const Ceiling ceiling = log.ceiling(kSamples);
  EXPECT_NEAR(exact_auc(logits, block.labels), ceiling.auc, 0.004);
  EXPECT_NEAR(sums.log_loss(), ceiling.log_loss, 0.004);
  EXPECT_NEAR(sums.normalised_entropy(), ceiling.normalised_entropy, 0.006);
  EXPECT_GT(ceiling.auc, 0.75);
  EXPECT_LT(ceiling.auc, 0.95);
}

TEST(Synthetic, CeilingWithoutStructureIsChance) {
  SyntheticOptions options;
  options.schema = {0, equal_features(2, 10)};
  options.effect_scale = 0;
  options.factor_scale = 0;
  const Ceiling ceiling = SyntheticLog(options).ceiling(1000);
  EXPECT_NEAR(ceiling.auc, 0.5, 1e-9);
  EXPECT_NEAR(ceiling.normalised_entropy, 1, 1e-6);
  EXPECT_NEAR(ceiling.click_rate, 1 / (1 + std::exp(1.0)), 1e-6);
}

TEST(Synthetic, ReadsTheSameBitsEverywhere) {
  SampleBlock block;
  SyntheticLog(SyntheticOptions{}).read(123456789, 3, block);
  std::uint64_t sum = 0;
  for (const std::int64_t id : block.ids) sum = sum * 1000003 + static_cast<std::uint64_t>(id);
  EXPECT_EQ(sum, 3764208447085431498U) << "the sample is another one than in the last version";
}

TEST(Synthetic, DenseNumbersAreLogsOfTheCounts) {
  const SyntheticLog log(small_options());
  SampleBlock block;
  log.read(77, 4, block);
  std::array<std::int32_t, 5> counts{};
  for (std::int64_t s = 0; s < 4; ++s) {
    log.counts(77 + s, counts);
    for (std::size_t d = 0; d < 5; ++d) {
      EXPECT_EQ(block.dense[static_cast<std::size_t>(s) * 5 + d],
                std::log1p(static_cast<float>(counts[d])));
    }
  }
}

TEST(Synthetic, RefusesOptionsThatMakeNoSense) {
  const auto message = [](auto change) -> std::string {
    SyntheticOptions options = small_options();
    change(options);
    try {
      const SyntheticLog log(options);
    } catch (const DataError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message([](auto& o) { o.schema.features[0].num_rows = 0; }),
            "synthetic: feature 'one' has 0 rows; 1 to 2147483647 can be drawn from.");
  EXPECT_EQ(message([](auto& o) { o.schema.features[1].bag_size = -1; }),
            "synthetic: feature 'three' has bags of -1 ids; 0 (varies) to 1000000 can be made.");
  EXPECT_EQ(message([](auto& o) { o.zipf_exponent = 5; }),
            "synthetic: the Zipf exponent must be from 0 to 4.");
  EXPECT_EQ(message([](auto& o) { o.effect_scale = -1; }), "synthetic: a scale is below 0.");
  EXPECT_EQ(message([](auto& o) { o.bias = INFINITY; }),
            "synthetic: a scale or the bias is not a finite number.");
  EXPECT_EQ(message([](auto& o) { o.largest_bag = 0; }),
            "synthetic: the largest bag must hold 1 to 1000000 ids.");
  EXPECT_EQ(message([](auto& o) { o.schema.num_dense = -1; }),
            "synthetic: the number of dense features is below 0.");
}

TEST(Synthetic, EndsWhereItWasToldTo) {
  SyntheticOptions options = small_options();
  options.num_samples = 10;
  const SyntheticLog log(options);
  SampleBlock block;
  log.read(5, 5, block);
  try {
    log.read(5, 6, block);
    FAIL();
  } catch (const DataError& error) {
    EXPECT_STREQ(error.what(), "synthetic: samples [5, 11) were asked for, it holds 10.");
  }
}

}  // namespace
