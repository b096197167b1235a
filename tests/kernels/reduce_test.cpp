// Reductions and copies of every instruction set against the plain loops.

#include "kernels/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace tessera::kernels {
namespace {

constexpr std::size_t kWidths[kNumElements] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};

std::size_t width_of(Element element) { return kWidths[static_cast<int>(element)]; }

bool is_nan(Element element, const std::byte* bytes) {
  std::uint16_t half = 0;
  std::memcpy(&half, bytes, 2);
  switch (element) {
    case Element::kFloat16:
      return (half & 0x7FFF) > 0x7C00;
    case Element::kBFloat16:
      return (half & 0x7FFF) > 0x7F80;
    case Element::kFloat32: {
      float value = 0;
      std::memcpy(&value, bytes, 4);
      return std::isnan(value);
    }
    case Element::kFloat64: {
      double value = 0;
      std::memcpy(&value, bytes, 8);
      return std::isnan(value);
    }
    default:
      return false;
  }
}

/// Random bits: for floating types these hold NaN, infinities, subnormals and both zeros.
std::vector<std::byte> random_bytes(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> data(bytes);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

/// Puts special values where random bits rarely are.
void add_special_values(Element element, std::vector<std::byte>& data, std::size_t offset) {
  const std::vector<std::uint64_t> bits =
      element == Element::kFloat16
          ? std::vector<std::uint64_t>{0x7C00, 0xFC00, 0x7E00, 0x8000, 1, 0x3C00}
      : element == Element::kBFloat16
          ? std::vector<std::uint64_t>{0x7F80, 0xFF80, 0x7FC0, 0x8000, 1, 0x3F80}
      : element == Element::kFloat32
          ? std::vector<std::uint64_t>{0x7F800000, 0xFF800000, 0x7FC00000,
                                       0x80000000, 1,          0x3F800000}
      : element == Element::kFloat64 ? std::vector<std::uint64_t>{0x7FF0000000000000,
                                                                  0xFFF0000000000000,
                                                                  0x7FF8000000000000,
                                                                  0x8000000000000000,
                                                                  1,
                                                                  0x3FF0000000000000}
                                     : std::vector<std::uint64_t>{};
  const std::size_t width = width_of(element);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const std::size_t at = offset + (i * 3 + i * i) * width;
    if (at + width <= data.size()) std::memcpy(data.data() + at, &bits[i], width);
  }
}

struct Case {
  Isa isa;
  Element element;
};

class Reduce : public ::testing::TestWithParam<Case> {
 protected:
  /// Compares one call with the plain loops; NaN equals NaN whatever its bits.
  void check(Reduction reduction, int num_sources, int num_destinations, std::int64_t count,
             std::size_t shift, bool in_place, Store store) {
    const Element element = GetParam().element;
    const std::size_t width = width_of(element);
    const std::size_t bytes = static_cast<std::size_t>(count) * width;
    const std::size_t offset = shift * width;
    std::vector<std::vector<std::byte>> sources;
    std::vector<const void*> source_pointers;
    for (int s = 0; s < num_sources; ++s) {
      sources.push_back(
          random_bytes(bytes + offset + 1, static_cast<std::uint64_t>(s + count + 1)));
      if (element == Element::kBool) {
        for (std::byte& byte : sources.back()) byte &= std::byte{1};
      }
      add_special_values(element, sources.back(), offset + static_cast<std::size_t>(s) * width);
    }
    for (auto& source : sources) source_pointers.push_back(source.data() + offset);
    std::vector<std::byte> expected(bytes + 1);
    void* expected_pointer = expected.data();
    reduce_reference().reduce(element, reduction, source_pointers.data(), num_sources,
                              &expected_pointer, 1, count, store);
    std::vector<std::vector<std::byte>> outputs(static_cast<std::size_t>(num_destinations),
                                                std::vector<std::byte>(bytes + offset + 9));
    std::vector<void*> destinations;
    for (int d = 0; d < num_destinations; ++d) {
      const bool is_source = in_place && d < num_sources;
      auto& output =
          is_source ? sources[static_cast<std::size_t>(d)] : outputs[static_cast<std::size_t>(d)];
      destinations.push_back(output.data() + offset);
    }
    reduce_kernels(GetParam().isa)
        ->reduce(element, reduction, source_pointers.data(), num_sources, destinations.data(),
                 num_destinations, count, store);
    for (int d = 0; d < num_destinations; ++d) {
      const auto* actual = static_cast<const std::byte*>(destinations[static_cast<std::size_t>(d)]);
      for (std::size_t i = 0; i < bytes; i += width) {
        if (std::memcmp(actual + i, expected.data() + i, width) == 0) continue;
        ASSERT_TRUE(is_nan(element, actual + i) && is_nan(element, expected.data() + i))
            << "element " << i / width << " of " << count << ", reduction "
            << static_cast<int>(reduction) << ", " << num_sources << " sources, shift " << shift;
      }
    }
  }
};

TEST_P(Reduce, MatchesThePlainLoops) {
  for (int r = 0; r < kNumReductions; ++r) {
    const auto reduction = static_cast<Reduction>(r);
    if (!can_reduce(GetParam().element, reduction)) continue;
    for (const std::int64_t count : {0, 1, 2, 7, 31, 33, 127, 128, 129, 1023, 1025, 4099}) {
      for (const int num_sources : {1, 2, 3, 4, 9}) {
        check(reduction, num_sources, 1, count, 0, false, Store::kCached);
      }
      check(reduction, 2, 2, count, 0, true, Store::kCached);
      check(reduction, 3, 3, count, 1, true, Store::kCached);
      check(reduction, 2, 1, count, 3, false, Store::kCached);
      check(reduction, 2, 1, count, 0, false, Store::kStreaming);
      check(reduction, 3, 2, count, 1, true, Store::kStreaming);
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> list;
  for (const Isa isa : supported_isas()) {
    for (int e = 0; e < kNumElements; ++e) list.push_back({isa, static_cast<Element>(e)});
  }
  return list;
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  static const char* const names[] = {"Bool",  "UInt8",   "Int8",     "Int16",   "Int32",
                                      "Int64", "Float16", "BFloat16", "Float32", "Float64"};
  return std::string(name_of(info.param.isa)) + names[static_cast<int>(info.param.element)];
}

INSTANTIATE_TEST_SUITE_P(Levels, Reduce, ::testing::ValuesIn(cases()), name_of_case);

TEST(ReduceReference, MinimumAndMaximumAreNanIfASourceIs) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float a[] = {1.0F, nan, 1.0F, nan};
  const float b[] = {2.0F, 2.0F, nan, nan};
  const void* sources[] = {a, b};
  for (const Isa isa : supported_isas()) {
    for (const Reduction reduction : {Reduction::kMin, Reduction::kMax}) {
      float result[4] = {};
      void* destination = result;
      reduce_kernels(isa)->reduce(Element::kFloat32, reduction, sources, 2, &destination, 1, 4,
                                  Store::kCached);
      EXPECT_EQ(result[0], reduction == Reduction::kMin ? 1.0F : 2.0F);
      for (int i = 1; i < 4; ++i) EXPECT_TRUE(std::isnan(result[i]));
    }
  }
}

TEST(ReduceReference, BoolSumIsOrAndProductIsAnd) {
  const std::uint8_t a[] = {0, 0, 1, 1};
  const std::uint8_t b[] = {0, 1, 0, 1};
  const void* sources[] = {a, b};
  for (const Isa isa : supported_isas()) {
    std::uint8_t result[4] = {};
    void* destination = result;
    const auto run = [&](Reduction reduction) {
      reduce_kernels(isa)->reduce(Element::kBool, reduction, sources, 2, &destination, 1, 4,
                                  Store::kCached);
      return std::vector<int>(result, result + 4);
    };
    EXPECT_EQ(run(Reduction::kSum), (std::vector<int>{0, 1, 1, 1}));
    EXPECT_EQ(run(Reduction::kProduct), (std::vector<int>{0, 0, 0, 1}));
    EXPECT_EQ(run(Reduction::kBxor), (std::vector<int>{0, 1, 1, 0}));
  }
}

TEST(ReduceReference, NarrowFloatsAreRoundedOnceToNearestEven) {
  // 2048 + 1 + 1 in float16: each sum alone would be rounded back to 2048; together they are 2050.
  const std::uint16_t big = 0x6800;
  const std::uint16_t one = 0x3C00;
  const void* sources[] = {&big, &one, &one};
  for (const Isa isa : supported_isas()) {
    std::uint16_t result = 0;
    void* destination = &result;
    reduce_kernels(isa)->reduce(Element::kFloat16, Reduction::kSum, sources, 3, &destination, 1, 1,
                                Store::kCached);
    EXPECT_EQ(result, 0x6801);
  }
}

TEST(Copy, CopiesEverySizeAndAlignment) {
  const std::vector<std::byte> source = random_bytes(5000, 3);
  for (const Isa isa : supported_isas()) {
    for (const Store store : {Store::kCached, Store::kStreaming}) {
      for (const std::size_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 130, 1000, 4096}) {
        for (const std::size_t from : {0, 1, 33}) {
          for (const std::size_t to : {0, 1, 31, 63}) {
            std::vector<std::byte> destination(5000, std::byte{7});
            reduce_kernels(isa)->copy(destination.data() + to, source.data() + from, bytes, store);
            ASSERT_EQ(std::memcmp(destination.data() + to, source.data() + from, bytes), 0);
            for (std::size_t i = 0; i < to; ++i) ASSERT_EQ(destination[i], std::byte{7});
            for (std::size_t i = to + bytes; i < 5000; ++i) ASSERT_EQ(destination[i], std::byte{7});
          }
        }
      }
    }
  }
}

TEST(Dispatch, TakesTheBestLevelUnlessTold) {
  std::string warning;
  EXPECT_EQ(choose_isa("", warning), supported_isas().back());
  EXPECT_EQ(choose_isa("default", warning), Isa::kDefault);
  EXPECT_EQ(warning, "");
}

TEST(Dispatch, WarnsOfALevelThatCannotBeHad) {
  std::string warning;
  EXPECT_EQ(choose_isa("mmx", warning), supported_isas().back());
  EXPECT_EQ(warning.rfind("kernels: TESSERA_ISA=mmx is not a level. Using ", 0), 0U) << warning;
  if (is_supported(Isa::kAvx512)) return;
  EXPECT_EQ(choose_isa("avx512", warning), supported_isas().back());
  EXPECT_EQ(warning.rfind("kernels: TESSERA_ISA=avx512 is not supported by this CPU. Using ", 0),
            0U)
      << warning;
}

}  // namespace
}  // namespace tessera::kernels
