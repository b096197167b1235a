// Rows in few bits: closed forms of the rules, and every instruction set of this machine judged by
// the plain loops, to the last bit.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/quantised_rows.h"

namespace tessera::kernels {
namespace {

constexpr RowType kTypes[] = {RowType::kFloat32, RowType::kFloat16, RowType::kBFloat16,
                              RowType::kInt8,    RowType::kInt4,    RowType::kInt2,
                              RowType::kFloat8};
constexpr std::int64_t kWidths[] = {1, 3, 15, 16, 17, 32, 40, 64, 100, 128, 200, 256};

std::size_t row_size(RowType type, std::int64_t count) {
  return static_cast<std::size_t>(head_bytes(type) + code_bytes(type, count));
}

std::vector<float> numbers(std::int64_t count, unsigned seed, float spread = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.1F * spread, spread);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<std::uint8_t> packed(const QuantisedRowKernels& kernels, RowType type,
                                 const std::vector<float>& values, std::uint8_t* faults = nullptr) {
  const auto count = static_cast<std::int64_t>(values.size());
  std::vector<std::uint8_t> row(row_size(type, count));
  const std::uint8_t found = kernels.quantise(type, values.data(), count, row.data());
  if (faults != nullptr) *faults = found;
  return row;
}

std::vector<float> unpacked(const QuantisedRowKernels& kernels, RowType type,
                            const std::vector<std::uint8_t>& row, std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  kernels.dequantise(type, row.data(), count, values.data());
  return values;
}

TEST(QuantisedRows, ARowOnTheGridComesBackAsItWas) {
  // Bias -2, scale 1/4: both are halves, so every code's number is one too.
  for (const auto& [type, most] :
       {std::pair{RowType::kInt8, 255}, {RowType::kInt4, 15}, {RowType::kInt2, 3}}) {
    std::vector<float> values;
    for (int code = 0; code <= most; ++code) {
      values.push_back(-2.0F + 0.25F * static_cast<float>(code));
    }
    const auto row = packed(quantised_row_reference(), type, values);
    EXPECT_EQ(row[0] | row[1] << 8, 0x3400);  // 0.25
    EXPECT_EQ(row[2] | row[3] << 8, 0xC000);  // -2
    EXPECT_EQ(unpacked(quantised_row_reference(), type, row, most + 1), values);
  }
  // The earlier code lies lower.
  const auto nibbles = packed(quantised_row_reference(), RowType::kInt4, {0, 15, 3});
  EXPECT_EQ(nibbles, (std::vector<std::uint8_t>{0x00, 0x3C, 0, 0, 0xF0, 0x03}));
  const auto pairs = packed(quantised_row_reference(), RowType::kInt2, {0, 1, 2, 3, 2});
  EXPECT_EQ(pairs, (std::vector<std::uint8_t>{0x00, 0x3C, 0, 0, 0xE4, 0x02}));
}

TEST(QuantisedRows, EighthsTakeTheLargestNumberTo448) {
  const auto row = packed(quantised_row_reference(), RowType::kFloat8, {-2, 1, 0, 0.25F});
  // 2/448 as a half is 0x1C92, a little more than it: 1 divided by it is 223.9, the nearest is 224.
  EXPECT_EQ(row, (std::vector<std::uint8_t>{0x92, 0x1C, 0, 0, 0xFE, 0x76, 0x00, 0x66}));
}

TEST(QuantisedRows, HalvesGoToEven) {
  // Bias 0, scale 1: 0.5 and 2.5 go down, 1.5 goes up.
  const auto row = packed(quantised_row_reference(), RowType::kInt4, {0, 15, 0.5F, 1.5F, 2.5F});
  EXPECT_EQ(row[5], 0x20);
  EXPECT_EQ(row[6], 0x02);
}

TEST(QuantisedRows, WhatCannotBeKeptIsSaid) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto check = [](RowType type, const std::vector<float>& values, std::uint8_t wanted) {
    for (const Isa isa : supported_isas()) {
      std::uint8_t found = 0;
      packed(*quantised_row_kernels(isa), type, values, &found);
      EXPECT_EQ(found, wanted) << name_of(isa) << ' ' << static_cast<int>(type);
    }
    std::uint8_t found = 0;
    packed(quantised_row_reference(), type, values, &found);
    EXPECT_EQ(found, wanted) << "reference " << static_cast<int>(type);
  };
  for (const RowType type : kTypes) {
    check(type, {1, 2, 3}, kRowFine);
    check(type, {1, 1, 1}, kRowFine);
    check(type, {0, 0, 0}, kRowFine);
    check(type, {1, kNan, 3}, kRowNan);
    check(type, {1, -kInfinity, 3}, kRowOverflow);
  }
  for (const RowType type : {RowType::kInt8, RowType::kInt4, RowType::kInt2, RowType::kFloat16}) {
    check(type, {1, -70000, 3}, kRowOverflow);
  }
  check(RowType::kInt2, {0, 65504.0F * 4, 3}, kRowOverflow);
  check(RowType::kFloat32, {1, -70000, 3}, kRowFine);
  check(RowType::kBFloat16, {1, -70000, 3}, kRowFine);
  check(RowType::kFloat8, {1, -70000, 3}, kRowFine);
  check(RowType::kInt8, {0, 1e-6F, 5e-7F}, kRowTinyRange);
  check(RowType::kInt2, {0, 1e-6F, 5e-7F}, kRowFine);
}

TEST(QuantisedRows, EveryLevelQuantisesAsThePlainLoops) {
  for (const Isa isa : supported_isas()) {
    for (const RowType type : kTypes) {
      for (const std::int64_t count : kWidths) {
        for (unsigned seed = 0; seed < 40; ++seed) {
          // From rows whose scale is subnormal to rows that overflow.
          const float spread = std::ldexp(1.0F, static_cast<int>(seed) - 22);
          const auto values = numbers(count, seed, spread);
          std::uint8_t found = 0;
          std::uint8_t wanted = 0;
          const auto row = packed(*quantised_row_kernels(isa), type, values, &found);
          ASSERT_EQ(row, packed(quantised_row_reference(), type, values, &wanted))
              << name_of(isa) << " type " << static_cast<int>(type) << " columns " << count
              << " spread " << spread;
          ASSERT_EQ(found, wanted) << name_of(isa) << " spread " << spread;
          if (wanted != kRowFine) continue;
          EXPECT_EQ(unpacked(*quantised_row_kernels(isa), type, row, count),
                    unpacked(quantised_row_reference(), type, row, count));
        }
      }
    }
  }
}

TEST(QuantisedRows, EveryByteOfAnEighthIsReadAlike) {
  std::vector<std::uint8_t> row = {0x00, 0x3C, 0, 0};
  for (int code = 0; code < 256; ++code) row.push_back(static_cast<std::uint8_t>(code));
  const auto wanted = unpacked(quantised_row_reference(), RowType::kFloat8, row, 256);
  EXPECT_EQ(wanted[0x7E], 448.0F);
  EXPECT_EQ(wanted[0x01], 0x1p-9F);
  EXPECT_TRUE(std::isnan(wanted[0xFF]));
  for (const Isa isa : supported_isas()) {
    const auto found = unpacked(*quantised_row_kernels(isa), RowType::kFloat8, row, 256);
    for (std::size_t i = 0; i < 256; ++i) {
      EXPECT_TRUE(found[i] == wanted[i] || (std::isnan(found[i]) && std::isnan(wanted[i]))) << i;
    }
  }
}

struct Case {
  std::vector<std::uint8_t> data;
  QuantisedRows rows;
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> offsets = {0};
  std::vector<float> weights;
};

// Bags of 0 to 6 ids over 50 rows, the first bag not at position 0.
Case a_case(RowType type, std::int64_t count, std::int64_t spare_bytes) {
  Case made;
  made.rows = {type, nullptr, 50, count,
               static_cast<std::int64_t>(row_size(type, count)) + spare_bytes};
  made.data.resize(static_cast<std::size_t>(50 * made.rows.row_bytes));
  for (unsigned r = 0; r < 50; ++r) {
    const auto values = numbers(count, r + 7);
    quantised_row_reference().quantise(type, values.data(), count,
                                       made.data.data() + r * made.rows.row_bytes);
  }
  made.rows.data = made.data.data();
  std::mt19937 random(5);
  made.ids = {3, 4};
  made.offsets = {2};
  for (int bag = 0; bag < 40; ++bag) {
    for (unsigned k = random() % 7; k > 0; --k) made.ids.push_back(random() % 50);
    made.offsets.push_back(static_cast<std::int64_t>(made.ids.size()));
  }
  made.weights = numbers(static_cast<std::int64_t>(made.ids.size()), 11);
  return made;
}

TEST(QuantisedRows, EveryLevelLooksUpAsThePlainLoops) {
  for (const RowType type : kTypes) {
    for (const std::int64_t count : kWidths) {
      const Case made = a_case(type, count, count % 2 == 0 ? 0 : 5);
      for (const bool is_mean : {false, true}) {
        for (const bool is_weighted : {false, true}) {
          const QuantisedBags bags{made.ids.data(), made.offsets.data(),
                                   is_weighted ? made.weights.data() : nullptr,
                                   static_cast<std::int64_t>(made.offsets.size()) - 1, is_mean};
          const std::int64_t stride = count + 3;
          std::vector<float> wanted(static_cast<std::size_t>(stride) * made.ids.size(), -7.0F);
          std::vector<float> in_order = wanted;
          EXPECT_EQ(quantised_row_reference().pooled(made.rows, bags, wanted.data(), stride), -1);
          quantised_row_reference().sequence(made.rows, bags, in_order.data(), stride);
          for (const Isa isa : supported_isas()) {
            std::vector<float> found(wanted.size(), -7.0F);
            const auto& kernels = *quantised_row_kernels(isa);
            EXPECT_EQ(kernels.pooled(made.rows, bags, found.data(), stride), -1);
            ASSERT_EQ(std::memcmp(found.data(), wanted.data(), 4 * wanted.size()), 0)
                << name_of(isa) << " type " << static_cast<int>(type) << " columns " << count;
            found.assign(wanted.size(), -7.0F);
            EXPECT_EQ(kernels.sequence(made.rows, bags, found.data(), stride), -1);
            ASSERT_EQ(std::memcmp(found.data(), in_order.data(), 4 * wanted.size()), 0)
                << name_of(isa) << " type " << static_cast<int>(type) << " columns " << count;
          }
        }
      }
    }
  }
}

TEST(QuantisedRows, ABagIsTheSumOfItsRowsAndAnEmptyOneIsZero) {
  const Case made = a_case(RowType::kInt8, 40, 0);
  const auto num_bags = static_cast<std::int64_t>(made.offsets.size()) - 1;
  const QuantisedBags bags{made.ids.data(), made.offsets.data(), nullptr, num_bags, true};
  std::vector<float> found(static_cast<std::size_t>(40 * num_bags));
  quantised_row_kernels().pooled(made.rows, bags, found.data(), 40);
  int num_empty = 0;
  for (std::size_t b = 0; b + 1 < made.offsets.size(); ++b) {
    std::vector<double> sum(40);
    for (std::int64_t k = made.offsets[b]; k < made.offsets[b + 1]; ++k) {
      std::vector<float> row(40);
      quantised_row_reference().dequantise(
          RowType::kInt8,
          made.data.data() + made.ids[static_cast<std::size_t>(k)] * made.rows.row_bytes, 40,
          row.data());
      for (std::size_t c = 0; c < 40; ++c) sum[c] += row[c];
    }
    const auto size = static_cast<double>(made.offsets[b + 1] - made.offsets[b]);
    num_empty += size == 0 ? 1 : 0;
    for (std::size_t c = 0; c < 40; ++c) {
      EXPECT_NEAR(found[b * 40 + c], size == 0 ? 0.0 : sum[c] / size, 1e-5);
    }
  }
  EXPECT_GT(num_empty, 0);
}

TEST(QuantisedRows, AnIdThatIsNoRowIsNamedByItsPosition) {
  Case made = a_case(RowType::kInt4, 32, 0);
  const auto num_bags = static_cast<std::int64_t>(made.offsets.size()) - 1;
  const QuantisedBags bags{made.ids.data(), made.offsets.data(), nullptr, num_bags, false};
  std::vector<float> output(32 * made.ids.size());
  made.ids[0] = -5;  // in front of the first bag
  for (const std::int64_t id : {std::int64_t{50}, std::int64_t{-1}, INT64_MAX, INT64_MIN}) {
    made.ids[17] = id;
    for (const Isa isa : supported_isas()) {
      const auto& kernels = *quantised_row_kernels(isa);
      EXPECT_EQ(kernels.pooled(made.rows, bags, output.data(), 32), 17);
      EXPECT_EQ(kernels.sequence(made.rows, bags, output.data(), 32), 17);
    }
    EXPECT_EQ(quantised_row_reference().pooled(made.rows, bags, output.data(), 32), 17);
    EXPECT_EQ(quantised_row_reference().sequence(made.rows, bags, output.data(), 32), 17);
  }
}

}  // namespace
}  // namespace tessera::kernels
