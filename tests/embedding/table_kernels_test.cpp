// The table kernels of every instruction set of this machine, judged by the plain loops.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/table_lookup.h"
#include "kernels/table_sort.h"
#include "kernels/table_update.h"

namespace tessera::kernels {
namespace {

constexpr Element kElements[] = {Element::kFloat32, Element::kFloat16, Element::kBFloat16};
constexpr std::int64_t kColumns[] = {1, 3, 17, 64, 128, 200};

/// A table of numbers around 1, each exact in its type.
struct Sample {
  Sample(Element element, std::int64_t num_rows, std::int64_t num_columns, unsigned seed = 1)
      : bytes(static_cast<std::size_t>(num_rows * num_columns) * 4), random(seed) {
    rows = {element, bytes.data(), num_rows, num_columns};
    for (std::int64_t i = 0; i < num_rows * num_columns; ++i) {
      const float value = static_cast<float>(static_cast<int>(random() % 257) - 128) / 128.0F;
      if (element == Element::kFloat32) {
        std::memcpy(bytes.data() + i * 4, &value, 4);
      } else {
        // Seven bits of fraction are exact in both 16-bit types.
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, 4);
        std::uint16_t narrow = static_cast<std::uint16_t>(bits >> 16);
        if (element == Element::kFloat16) {
          const std::uint32_t exponent = (bits >> 23) & 255U;
          narrow = static_cast<std::uint16_t>(
              (bits >> 16 & 0x8000U) |
              (exponent == 0 ? 0U : (exponent - 112U) << 10 | ((bits >> 13) & 1023U)));
        }
        std::memcpy(bytes.data() + i * 2, &narrow, 2);
      }
    }
  }
  std::vector<float> floats(std::size_t count) {
    std::vector<float> values(count);
    for (float& value : values) {
      value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 512.0F;
    }
    return values;
  }
  std::vector<char> bytes;
  TableRows rows;
  std::mt19937 random;
};

/// Bags of 0 to 5 ids, some of them equal.
struct Bags {
  Bags(std::int64_t num_bags, std::int64_t num_rows, std::mt19937& random) {
    offsets.push_back(0);
    for (std::int64_t bag = 0; bag < num_bags; ++bag) {
      const auto count = static_cast<std::int64_t>(random() % 6);
      for (std::int64_t k = 0; k < count; ++k) {
        ids.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(num_rows)));
      }
      offsets.push_back(static_cast<std::int64_t>(ids.size()));
    }
    narrow_ids.assign(ids.begin(), ids.end());
    narrow_offsets.assign(offsets.begin(), offsets.end());
  }
  LookupIds view(bool is_wide, const float* weights = nullptr) const {
    LookupIds view;
    view.ids = is_wide ? static_cast<const void*>(ids.data()) : narrow_ids.data();
    view.offsets = is_wide ? static_cast<const void*>(offsets.data()) : narrow_offsets.data();
    view.weights = weights;
    view.wide_ids = is_wide;
    view.wide_offsets = is_wide;
    return view;
  }
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> narrow_ids;
  std::vector<std::int32_t> narrow_offsets;
};

void expect_near(const std::vector<float>& found, const std::vector<float>& wanted, float slack) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(found[i], wanted[i], slack * (1.0F + std::fabs(wanted[i]))) << "element " << i;
  }
}

TEST(TableLookup, EveryLevelReadsWhatThePlainLoopsRead) {
  for (const Isa isa : supported_isas()) {
    const TableLookupKernels& kernels = *table_lookup_kernels(isa);
    const TableLookupKernels& judge = table_lookup_reference();
    for (const Element element : kElements) {
      for (const std::int64_t columns : kColumns) {
        for (const bool is_mean : {false, true}) {
          for (const bool is_weighted : {false, true}) {
            SCOPED_TRACE(testing::Message() << name_of(isa) << " columns " << columns << " element "
                                            << static_cast<int>(element));
            Sample sample(element, 37, columns);
            const Bags bags(23, 37, sample.random);
            const std::vector<float> weights = sample.floats(bags.ids.size());
            const LookupIds ids = bags.view(!is_mean, is_weighted ? weights.data() : nullptr);
            TableFeature feature;
            feature.rows = sample.rows;
            feature.num_bags = 23;
            feature.output = 2;
            feature.output_stride = columns + 5;
            feature.is_mean = is_mean;
            std::vector<float> found(23 * (columns + 5) + 2, -7.0F);
            std::vector<float> wanted = found;
            EXPECT_EQ(kernels.pooled(ids, feature, 0, 11, found.data()), -1);
            EXPECT_EQ(kernels.pooled(ids, feature, 11, 23, found.data()), -1);
            EXPECT_EQ(judge.pooled(ids, feature, 0, 23, wanted.data()), -1);
            expect_near(found, wanted, 1e-6F);

            const auto gradient = sample.floats(found.size());
            std::vector<float> of_weights(bags.ids.size());
            std::vector<float> wanted_of_weights = of_weights;
            kernels.weight_gradient(ids, feature, false, 0, 23, gradient.data(), of_weights.data());
            judge.weight_gradient(ids, feature, false, 0, 23, gradient.data(),
                                  wanted_of_weights.data());
            expect_near(of_weights, wanted_of_weights, 2e-5F);

            feature.output = 1;
            const auto count = static_cast<std::int64_t>(bags.ids.size());
            found.assign(static_cast<std::size_t>(count * columns + 1), -7.0F);
            wanted = found;
            EXPECT_EQ(kernels.sequence(ids, feature, 0, count, found.data()), -1);
            judge.sequence(ids, feature, 0, count, wanted.data());
            expect_near(found, wanted, 1e-7F);
          }
        }
      }
    }
  }
}

TEST(TableLookup, AnIdOutsideCountsAsRowZeroAndIsReported) {
  for (const Isa isa : supported_isas()) {
    for (const std::int64_t columns : {1, 17, 64}) {
      for (const std::int64_t num_rows : {0, 4}) {
        Sample sample(Element::kFloat32, num_rows, columns);
        const std::int64_t ids[] = {2, -1, 4, std::int64_t{1} << 62, 0};
        const std::int64_t offsets[] = {0, 1, 1, 4, 5};
        LookupIds view;
        view.ids = ids;
        view.offsets = offsets;
        TableFeature feature;
        feature.rows = sample.rows;
        feature.num_bags = 4;
        feature.output_stride = columns;
        std::vector<float> found(4 * columns, -7.0F);
        std::vector<float> wanted = found;
        EXPECT_EQ(table_lookup_kernels(isa)->pooled(view, feature, 0, 4, found.data()),
                  num_rows == 0 ? 0 : 1);
        table_lookup_reference().pooled(view, feature, 0, 4, wanted.data());
        EXPECT_EQ(found, wanted);
        found.assign(5 * columns, -7.0F);
        wanted = found;
        EXPECT_EQ(table_lookup_kernels(isa)->sequence(view, feature, 1, 5, found.data()), 1);
        table_lookup_reference().sequence(view, feature, 1, 5, wanted.data());
        EXPECT_EQ(found, wanted);
      }
    }
  }
}

TEST(TableSort, IsStableForAnyNumberOfRowsAndPieces) {
  std::mt19937_64 random(3);
  for (const std::int64_t num_rows : {std::int64_t{1}, std::int64_t{2}, std::int64_t{1000},
                                      std::int64_t{200'000}, (std::int64_t{1} << 32) - 1}) {
    for (const std::size_t count : {0, 1, 5000}) {
      std::vector<RowEntry> entries;
      for (std::size_t i = 0; i < count; ++i) {
        entries.push_back(make_entry(random() % static_cast<std::uint64_t>(num_rows) / 3 * 3, i));
      }
      std::vector<RowEntry> wanted = entries;
      std::stable_sort(wanted.begin(), wanted.end(),
                       [](RowEntry a, RowEntry b) { return row_of(a) < row_of(b); });
      const RadixPlan plan = radix_plan(num_rows);
      std::vector<RowEntry> spare(count);
      std::vector<std::uint32_t> counts(plan.num_counts());
      sort_entries(plan, entries, spare.data(), counts.data());
      EXPECT_EQ(entries, wanted);
    }
  }
}

/// Entries of a batch of bags, and gradients for them.
struct Gradients {
  Gradients(Sample& sample, bool is_weighted, bool is_mean)
      : bags(40, sample.rows.num_rows, sample.random) {
    const std::int64_t columns = sample.rows.num_columns;
    weights = sample.floats(bags.ids.size());
    data = sample.floats(40 * (columns + 3));
    ids = bags.view(true, is_weighted ? weights.data() : nullptr);
    TableFeature feature;
    feature.rows = sample.rows;
    feature.num_bags = 40;
    entries.resize(bags.ids.size());
    bag_of.resize(bags.ids.size());
    fill_entries(ids, feature, 0, 40, is_weighted ? EntrySource::kPosition : EntrySource::kBag,
                 entries.data(), bag_of.data());
    std::vector<RowEntry> spare(entries.size());
    const RadixPlan plan = radix_plan(sample.rows.num_rows);
    std::vector<std::uint32_t> counts(plan.num_counts());
    sort_entries(plan, entries, spare.data(), counts.data());
    // Two features: the first 25 bags, and the others further on.
    segments = {{0, 1, columns + 3}, {25, 2 + 25 * (columns + 3), columns + 3}};
    view.data = data.data();
    view.segments = segments.data();
    view.num_segments = 2;
    if (is_weighted) {
      view.weights = weights.data();
      view.bag_of = bag_of.data();
    }
    if (is_mean) view.bags = &ids;
  }
  Bags bags;
  std::vector<float> weights;
  std::vector<float> data;
  LookupIds ids;
  std::vector<RowEntry> entries;
  std::vector<std::uint32_t> bag_of;
  std::vector<GradientSegment> segments;
  RowGradients view;
};

RowStep step_with(RowRule rule) {
  RowStep step;
  step.rule = rule;
  step.rate = 0.05F;
  step.eps = 1e-3F;
  step.beta1 = 0.9F;
  step.rest1 = 0.1F;
  step.beta2 = 0.99F;
  step.rest2 = 0.01F;
  step.correction1 = 1.0F / (1.0F - 0.9F * 0.9F);
  step.correction2 = 1.0F / (1.0F - 0.99F * 0.99F);
  step.momentum = 0.9F;
  step.eta = 0.1F;
  step.key = 77;
  return step;
}

/// Rows, state and the bits of both after one step.
std::vector<char> bytes_of(const Sample& sample, const std::vector<float>& m,
                           const std::vector<float>& v) {
  std::vector<char> bytes = sample.bytes;
  bytes.insert(bytes.end(), reinterpret_cast<const char*>(m.data()),
               reinterpret_cast<const char*>(m.data() + m.size()));
  bytes.insert(bytes.end(), reinterpret_cast<const char*>(v.data()),
               reinterpret_cast<const char*>(v.data() + v.size()));
  return bytes;
}

double value_at(const Sample& sample, std::int64_t i) {
  if (sample.rows.element == Element::kFloat32) {
    return static_cast<const float*>(sample.rows.data)[i];
  }
  const auto bits = static_cast<const std::uint16_t*>(sample.rows.data)[i];
  if (sample.rows.element == Element::kBFloat16) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value = 0;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double size =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000U) != 0 ? -size : size;
}

TEST(TableUpdate, EveryRuleOnEveryLevelStepsAsThePlainLoops) {
  constexpr RowRule kRules[] = {RowRule::kSgd,
                                RowRule::kAdagrad,
                                RowRule::kRowWiseAdagrad,
                                RowRule::kAdam,
                                RowRule::kPartialRowWiseAdam,
                                RowRule::kLamb,
                                RowRule::kPartialRowWiseLamb,
                                RowRule::kLarsSgd};
  for (const Isa isa : supported_isas()) {
    for (const RowRule rule : kRules) {
      for (const Element element : kElements) {
        for (const std::int64_t columns : kColumns) {
          for (const int decay : {0, 1, 2}) {
            SCOPED_TRACE(testing::Message() << name_of(isa) << " rule " << static_cast<int>(rule)
                                            << " element " << static_cast<int>(element)
                                            << " columns " << columns << " decay " << decay);
            Sample found(element, 31, columns);
            Sample wanted(element, 31, columns);
            Sample source(element, 31, columns, 5);
            Gradients gradients(source, decay == 1, decay == 2);
            if (decay == 2) gradients.view.limit = 1.0F;
            RowStep step = step_with(rule);
            step.decay = decay == 0 ? 0.0F : 0.01F;
            step.is_decoupled = decay == 2;
            const std::size_t width1 = has_full_momentum1(rule) ? columns : 1;
            const std::size_t width2 = has_full_momentum2(rule) ? columns : 1;
            std::vector<float> m(31 * width1, 0.25F);
            std::vector<float> v(31 * width2, 0.125F);
            std::vector<float> wanted_m = m;
            std::vector<float> wanted_v = v;
            std::vector<float> buffer(buffer_floats(columns));
            const RowState state{rule == RowRule::kSgd ? nullptr : m.data(),
                                 has_momentum2(rule) ? v.data() : nullptr};
            const RowState judge{rule == RowRule::kSgd ? nullptr : wanted_m.data(),
                                 has_momentum2(rule) ? wanted_v.data() : nullptr};
            const auto count = static_cast<std::int64_t>(gradients.entries.size());
            table_update_kernels(isa)->update(gradients.view, gradients.entries.data(), 0, count,
                                              found.rows, state, step, buffer.data());
            table_update_reference().update(gradients.view, gradients.entries.data(), 0, count,
                                            wanted.rows, judge, step, nullptr);
            expect_near(m, wanted_m, 3e-6F);
            expect_near(v, wanted_v, 3e-6F);
            // A 16-bit row may be rounded to the neighbour.
            const double slack = element == Element::kFloat32   ? 4e-6
                                 : element == Element::kFloat16 ? 1.1 / 1024
                                                                : 1.1 / 128;
            for (std::int64_t i = 0; i < 31 * columns; ++i) {
              ASSERT_NEAR(value_at(found, i), value_at(wanted, i),
                          slack * (std::fabs(value_at(wanted, i)) + 0.01))
                  << "element " << i;
            }
          }
        }
      }
    }
  }
}

TEST(TableUpdate, SumsRowsByNumberAndByPlace) {
  for (const Isa isa : supported_isas()) {
    for (const std::int64_t columns : kColumns) {
      Sample source(Element::kFloat32, 31, columns, 5);
      const Gradients gradients(source, false, false);
      const auto count = static_cast<std::int64_t>(gradients.entries.size());
      std::vector<float> buffer(buffer_floats(columns));
      for (const bool by_row : {false, true}) {
        std::vector<float> found(31 * columns, 0.0F);
        std::vector<float> wanted = found;
        table_update_kernels(isa)->sum_rows(gradients.view, gradients.entries.data(), 0, count,
                                            columns, by_row, found.data(), buffer.data());
        table_update_reference().sum_rows(gradients.view, gradients.entries.data(), 0, count,
                                          columns, by_row, wanted.data(), nullptr);
        expect_near(found, wanted, 1e-6F);
      }
    }
  }
}

TEST(TableUpdate, RandomRoundingHasTheSameBitsEverywhereAndTheRightMean) {
  for (const Element element : {Element::kFloat16, Element::kBFloat16}) {
    std::vector<std::vector<char>> results;
    for (const Isa isa : supported_isas()) {
      Sample sample(element, 31, 64);
      Sample source(element, 31, 64, 5);
      const Gradients gradients(source, false, false);
      RowStep step = step_with(RowRule::kSgd);
      step.is_stochastic = true;
      step.rate = 0.0625F;  // products are exact, so that only the rounding counts
      std::vector<float> buffer(buffer_floats(64));
      table_update_kernels(isa)->update(gradients.view, gradients.entries.data(), 0,
                                        static_cast<std::int64_t>(gradients.entries.size()),
                                        sample.rows, {}, step, buffer.data());
      results.push_back(bytes_of(sample, {}, {}));
      EXPECT_EQ(results.back(), results.front()) << name_of(isa);
    }
  }
  for (const float value : {1.0F + 0x1p-13F, -3.0F - 0x1p-12F, 0x1.3p-20F, 100.03F}) {
    double brain = 0;
    double half = 0;
    constexpr int kDraws = 1 << 16;
    for (int i = 0; i < kDraws; ++i) {
      const std::uint32_t random = column_bits(row_seed(9, i), 3);
      Sample one(Element::kBFloat16, 1, 1);
      const std::uint16_t bits = stochastic_brain(value, random);
      std::memcpy(one.bytes.data(), &bits, 2);
      brain += value_at(one, 0);
      const std::uint16_t half_bits = stochastic_half(value, random);
      one.rows.element = Element::kFloat16;
      std::memcpy(one.bytes.data(), &half_bits, 2);
      half += value_at(one, 0);
    }
    // Five standard deviations of the mean, whose step is 2^-7 or 2^-10 of the value.
    const double deviation = 5 * 0.5 / std::sqrt(static_cast<double>(kDraws));
    EXPECT_NEAR(brain / kDraws, value, std::fabs(value) * 0x1p-7 * deviation);
    EXPECT_NEAR(half / kDraws, value, std::max(std::fabs(value) * 0x1p-10, 0x1p-24) * deviation);
  }
}

TEST(TableUpdate, RandomRoundingKeepsWhatIsNoNumber) {
  const float nan = std::nanf("");
  EXPECT_EQ(stochastic_brain(std::numeric_limits<float>::infinity(), ~0U), 0x7F80);
  EXPECT_EQ(stochastic_half(-std::numeric_limits<float>::infinity(), ~0U), 0xFC00);
  EXPECT_GT(stochastic_brain(nan, ~0U) & 0x7FFF, 0x7F80);
  EXPECT_GT(stochastic_half(nan, ~0U) & 0x7FFF, 0x7C00);
  EXPECT_EQ(stochastic_half(65504.0F, ~0U), 0x7BFF);
  EXPECT_EQ(stochastic_half(65519.0F, ~0U), 0x7BFF);
  EXPECT_EQ(stochastic_half(65520.0F, 0U), 0x7C00);
}

}  // namespace
}  // namespace tessera::kernels
