// The byte kernels of every instruction set of this machine, judged by the plain loops.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/byte_rows.h"

namespace tessera::kernels {
namespace {

constexpr std::int64_t kCounts[] = {0, 1, 7, 31, 64, 1000, 4099};

std::vector<float> numbers(std::int64_t count, float low, float high) {
  std::mt19937 random(static_cast<unsigned>(count) + 1);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = uniform(random);
  return values;
}

TEST(ByteRows, TheRangeHoldsZeroAndEveryValue) {
  constexpr float kBounds[][2] = {{-1, 3}, {2, 5}, {-5, -2}};
  for (const Isa isa : supported_isas()) {
    for (const std::int64_t count : kCounts) {
      for (const auto& bounds : kBounds) {
        const auto values = numbers(count, bounds[0], bounds[1]);
        float found[2];
        float wanted[2];
        byte_row_kernels(isa)->range(values.data(), count, &found[0], &found[1]);
        byte_row_reference().range(values.data(), count, &wanted[0], &wanted[1]);
        EXPECT_EQ(found[0], wanted[0]) << name_of(isa) << ' ' << count;
        EXPECT_EQ(found[1], wanted[1]) << name_of(isa) << ' ' << count;
      }
    }
  }
}

TEST(ByteRows, ANanAnywhereIsInTheRange) {
  for (const Isa isa : supported_isas()) {
    for (const std::size_t place : {0, 33, 69}) {
      auto values = numbers(70, -1, 1);
      values[place] = std::numeric_limits<float>::quiet_NaN();
      float low = 0;
      float high = 0;
      byte_row_kernels(isa)->range(values.data(), 70, &low, &high);
      EXPECT_TRUE(std::isnan(low) && std::isnan(high)) << name_of(isa) << ' ' << place;
    }
  }
}

TEST(ByteRows, EveryLevelPacksAndAddsAsThePlainLoops) {
  for (const Isa isa : supported_isas()) {
    for (const std::int64_t count : kCounts) {
      auto values = numbers(count, -2, 6);
      // Halves between two levels, and values beyond the last ones.
      for (std::size_t i = 0; i + 4 < values.size(); i += 5) {
        values[i] = 0.03125F * (static_cast<float>(i % 100) + 0.5F);
        values[i + 1] = i % 2 == 0 ? 100.0F : -100.0F;
      }
      std::vector<std::uint8_t> found(static_cast<std::size_t>(count));
      std::vector<std::uint8_t> wanted = found;
      byte_row_kernels(isa)->pack(values.data(), count, 0.03125F, 64, found.data());
      byte_row_reference().pack(values.data(), count, 0.03125F, 64, wanted.data());
      EXPECT_EQ(found, wanted) << name_of(isa) << ' ' << count;

      // Products are rounded before they are added: all levels agree to the bit.
      std::vector<float> sum(static_cast<std::size_t>(count), 0.5F);
      std::vector<float> wanted_sum = sum;
      byte_row_kernels(isa)->add(found.data(), count, 0.0314F, 64, sum.data());
      byte_row_reference().add(wanted.data(), count, 0.0314F, 64, wanted_sum.data());
      EXPECT_EQ(sum, wanted_sum) << name_of(isa) << ' ' << count;
    }
  }
}

// A sum that may be anything where it is NaN.
void expect_same(const std::vector<float>& found, const std::vector<float>& wanted, Isa isa) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (std::isnan(wanted[i])) {
      EXPECT_TRUE(std::isnan(found[i])) << name_of(isa) << ' ' << i;
    } else {
      EXPECT_EQ(found[i], wanted[i]) << name_of(isa) << ' ' << i;
    }
  }
}

TEST(ByteRows, SignedBytesKeepWhatIsLostAsThePlainLoops) {
  for (const Isa isa : supported_isas()) {
    const ByteRowKernels& kernels = *byte_row_kernels(isa);
    for (const std::int64_t count : kCounts) {
      const auto size = static_cast<std::size_t>(count);
      const auto values = numbers(count, -3, 2);
      for (const bool has_before : {false, true}) {
        const auto before = numbers(count, -0.01F, 0.01F);
        std::vector<float> found = before;
        std::vector<float> wanted(size);
        // In place on one side, apart on the other.
        const float largest =
            kernels.carry(values.data(), has_before ? found.data() : nullptr, count, found.data());
        EXPECT_EQ(largest,
                  byte_row_reference().carry(values.data(), has_before ? before.data() : nullptr,
                                             count, wanted.data()))
            << name_of(isa) << ' ' << count;
        expect_same(found, wanted, isa);

        for (std::size_t i = 0; i + 4 < size; i += 5) {
          found[i] = wanted[i] = 0.03125F * (static_cast<float>(i % 100) + 0.5F);  // a half
          found[i + 1] = wanted[i + 1] = i % 2 == 0 ? 100.0F : -100.0F;            // too large
        }
        std::vector<std::int8_t> bytes(size);
        std::vector<std::int8_t> wanted_bytes(size);
        kernels.pack_signed(found.data(), count, 0.03125F, bytes.data());
        byte_row_reference().pack_signed(wanted.data(), count, 0.03125F, wanted_bytes.data());
        EXPECT_EQ(bytes, wanted_bytes) << name_of(isa) << ' ' << count;
        expect_same(found, wanted, isa);

        std::vector<float> sum(size, 0.5F);
        std::vector<float> wanted_sum = sum;
        kernels.add_signed(bytes.data(), count, 0.0314F, sum.data());
        byte_row_reference().add_signed(bytes.data(), count, 0.0314F, wanted_sum.data());
        expect_same(sum, wanted_sum, isa);
      }
    }
  }
}

TEST(ByteRows, SignedBytesOfWhatIsNotFiniteAreNotEither) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Isa isa : supported_isas()) {
    const ByteRowKernels& kernels = *byte_row_kernels(isa);
    for (const std::size_t place : {0, 33, 69}) {
      for (const float odd : {kNan, kInfinity, -kInfinity}) {
        auto values = numbers(70, -1, 1);
        values[place] = odd;
        std::vector<float> sum(70);
        const float largest = kernels.carry(values.data(), nullptr, 70, sum.data());
        EXPECT_TRUE(std::isnan(odd) ? std::isnan(largest) : largest == kInfinity)
            << name_of(isa) << ' ' << place;
        std::vector<std::int8_t> bytes(70);
        kernels.pack_signed(sum.data(), 70, largest / 127, bytes.data());
        std::vector<float> result(70, 0.0F);
        kernels.add_signed(bytes.data(), 70, largest / 127, result.data());
        for (std::size_t i = 0; i < result.size(); ++i) {
          EXPECT_TRUE(std::isnan(sum[i])) << name_of(isa) << ' ' << i;
          EXPECT_TRUE(std::isnan(result[i])) << name_of(isa) << ' ' << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
