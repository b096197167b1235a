// Products of pairs on every instruction set against the plain loops.

#include "kernels/pair_products.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

namespace tessera::kernels {
namespace {

constexpr float kUntouched = 77.0F;

class PairProducts : public ::testing::TestWithParam<Isa> {
 protected:
  const PairProductKernels& kernels() const { return *pair_product_kernels(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Levels, PairProducts, ::testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

std::vector<float> numbers(std::int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

struct Samples {
  std::vector<float> first;
  std::vector<float> parts;
  std::vector<std::int64_t> offsets;
  SampleVectors vectors;

  // Vectors in reverse, with a part between them that none covers, and strides of their own.
  Samples(std::int64_t batch, std::int64_t count, std::int64_t dim)
      : first(numbers(batch * (dim + 3), 1)), parts(numbers(batch * ((2 * count + 1) * dim), 2)) {
    for (std::int64_t i = 0; i < count; ++i) offsets.push_back((2 * (count - i) - 1) * dim);
    vectors = {first.data(),   dim + 3, parts.data(), (2 * count + 1) * dim,
               offsets.data(), count,   dim};
  }
};

void expect_near(const std::vector<float>& found, const std::vector<float>& expected, float scale) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    // Sums of `scale` products of numbers around 1: some roundings each.
    ASSERT_NEAR(found[i], expected[i], 2e-6F * scale * (1 + std::abs(expected[i]))) << i;
  }
}

TEST_P(PairProducts, EqualTheReference) {
  for (const std::int64_t count : {0, 1, 2, 7, 8, 9, 26}) {
    for (const std::int64_t dim : {1, 4, 8, 13, 16, 32, 40, 67}) {
      constexpr std::int64_t kBatch = 3;
      const Samples samples(kBatch, count, dim);
      const std::int64_t width = samples.vectors.num_outputs();
      const auto size = static_cast<std::size_t>(kBatch * width);
      std::vector<float> found(size, kUntouched);
      std::vector<float> expected(size, kUntouched);
      kernels().products(samples.vectors, 1, kBatch, found.data());
      pair_product_reference().products(samples.vectors, 1, kBatch, expected.data());
      expect_near(found, expected, static_cast<float>(dim));
      EXPECT_EQ(found[0], kUntouched) << "sample 0 was not asked for";
    }
  }
}

TEST_P(PairProducts, GradientsEqualTheReference) {
  for (const std::int64_t count : {0, 1, 2, 7, 8, 9, 26}) {
    for (const std::int64_t dim : {1, 4, 8, 13, 16, 32, 40, 67}) {
      constexpr std::int64_t kBatch = 3;
      const Samples samples(kBatch, count, dim);
      const auto gradient = numbers(kBatch * samples.vectors.num_outputs(), 3);
      std::vector<float> first[2];
      std::vector<float> parts[2];
      const PairProductKernels* judged[] = {&kernels(), &pair_product_reference()};
      for (const int k : {0, 1}) {
        first[k].assign(static_cast<std::size_t>(kBatch * dim), kUntouched);
        parts[k].assign(samples.parts.size(), kUntouched);
        judged[k]->gradients(samples.vectors, 1, kBatch, gradient.data(), first[k].data(),
                             parts[k].data());
      }
      expect_near(first[0], first[1], static_cast<float>(count + 1));
      expect_near(parts[0], parts[1], static_cast<float>(count + 1));
      EXPECT_EQ(parts[0].back(), kUntouched) << "no vector lies there";
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
