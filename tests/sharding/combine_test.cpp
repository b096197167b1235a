// The kernels of the way home against plain loops, on every instruction set of this machine; and
// ids of row-cut tables against a search by hand.

#include <gtest/gtest.h>

#include <random>

#include "kernels/combine.h"
#include "kernels/row_cut.h"

namespace tessera::kernels {
namespace {

std::vector<float> random_numbers(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> numbers(-1, 1);
  std::vector<float> result(count);
  for (float& number : result) number = numbers(random);
  return result;
}

struct Blocks {
  std::int64_t rows = 9;
  std::int64_t samples = 5;
  std::int64_t stride = 0;
  std::vector<std::vector<float>> data;
  std::vector<std::int64_t> sample;
  std::vector<float> factor;
  std::vector<RowBlock> blocks;

  Blocks(bool has_samples, bool has_factors, bool has_sums) {
    for (std::int64_t row = 0; row < rows; ++row) sample.push_back(row * 3 % samples);
    factor = random_numbers(static_cast<std::size_t>(rows), 5);
    const std::vector<std::int64_t> widths{1, 7, 16, 64, 33};
    data.reserve(2 * widths.size());
    for (const std::int64_t width : widths) {
      for (int copy = 0; copy < (has_sums ? 2 : 1); ++copy) {
        data.push_back(random_numbers(static_cast<std::size_t>(rows * width), data.size()));
        blocks.push_back({data.back().data(), width, stride, has_samples ? sample.data() : nullptr,
                          has_factors ? factor.data() : nullptr, copy > 0});
      }
      stride += width;
    }
  }
};

TEST(Combine, EveryInstructionSetDoesWhatPlainLoopsDo) {
  for (const Isa isa : supported_isas()) {
    for (int mask = 0; mask < 8; ++mask) {
      Blocks expected((mask & 1) != 0, (mask & 2) != 0, (mask & 4) != 0);
      Blocks actual = Blocks((mask & 1) != 0, (mask & 2) != 0, (mask & 4) != 0);
      const auto size = static_cast<std::size_t>(expected.rows * expected.stride);
      std::vector<float> a(size, 9);
      std::vector<float> b(size, 9);
      const auto count = static_cast<std::int64_t>(expected.blocks.size());
      combine_reference().combine(expected.blocks.data(), count, 1, expected.rows, expected.stride,
                                  a.data());
      combine_kernels(isa)->combine(actual.blocks.data(), count, 1, actual.rows, actual.stride,
                                    b.data());
      for (std::size_t i = 0; i < size; ++i) EXPECT_NEAR(a[i], b[i], 1e-6) << i;

      const std::vector<float> gradient = random_numbers(size, 77);
      for (std::size_t k = 0; k < expected.blocks.size(); ++k) {
        std::fill(expected.data[k].begin(), expected.data[k].end(), 0.0F);
        std::fill(actual.data[k].begin(), actual.data[k].end(), 0.0F);
        combine_reference().spread(expected.blocks[k], 0, expected.rows, gradient.data(),
                                   expected.stride);
        combine_kernels(isa)->spread(actual.blocks[k], 0, actual.rows, gradient.data(),
                                     actual.stride);
        for (std::size_t i = 0; i < expected.data[k].size(); ++i) {
          EXPECT_NEAR(expected.data[k][i], actual.data[k][i], 1e-5) << k << " " << i;
        }
      }
    }
  }
}

template <typename Id>
void check_cut(std::int64_t num_parts) {
  std::mt19937_64 random(static_cast<std::uint64_t>(num_parts));
  std::vector<std::int64_t> starts{0};
  for (std::int64_t p = 0; p < num_parts; ++p) {
    starts.push_back(starts.back() + 1 + static_cast<std::int64_t>(random() % 5));
  }
  const std::vector<std::int64_t> bags{3, 0, 40, 1};
  std::vector<Id> ids;
  std::vector<float> weights;
  for (int i = 0; i < 44; ++i) {
    ids.push_back(static_cast<Id>(random() % static_cast<std::uint64_t>(starts.back())));
    weights.push_back(static_cast<float>(i));
  }
  ids[5] = -1;                              // outside: row 0
  ids[6] = static_cast<Id>(starts.back());  // outside: row 0
  const RowCut<Id> cut{ids.data(), 44, starts.data(), num_parts};
  std::vector<std::vector<std::int32_t>> lengths(static_cast<std::size_t>(num_parts),
                                                 std::vector<std::int32_t>(bags.size(), 0));
  std::vector<std::int32_t*> places;
  for (auto& part : lengths) places.push_back(part.data());
  count_parts(cut, bags.data(), static_cast<std::int64_t>(bags.size()), places.data());
  std::vector<std::int64_t> cursor{0};
  for (const auto& part : lengths) {
    std::int64_t total = cursor.back();
    for (const std::int32_t length : part) total += length;
    cursor.push_back(total);
  }
  ASSERT_EQ(cursor.back(), 44);
  std::vector<Id> moved(44);
  std::vector<float> moved_weights(44);
  std::vector<std::int64_t> source(44);
  const RowCutExtras extras{weights.data(), moved_weights.data(), source.data(), 100};
  std::vector<std::int64_t> next = cursor;
  fill_parts(cut, extras, next.data(), moved.data());

  // By hand: part by part, bag by bag, in order.
  std::size_t at = 0;
  for (std::size_t p = 0; p < lengths.size(); ++p) {
    std::size_t i = 0;
    for (std::size_t bag = 0; bag < bags.size(); ++bag) {
      std::int32_t count = 0;
      for (std::int64_t k = 0; k < bags[bag]; ++k, ++i) {
        std::int64_t id = ids[i];
        if (id < 0 || id >= starts.back()) id = 0;
        if (id < starts[p] || id >= starts[p + 1]) continue;
        EXPECT_EQ(moved[at], static_cast<Id>(id - starts[p]));
        EXPECT_EQ(moved_weights[at], weights[i]);
        EXPECT_EQ(source[at], 100 + static_cast<std::int64_t>(i));
        ++at;
        ++count;
      }
      EXPECT_EQ(lengths[p][bag], count);
    }
  }
}

TEST(RowCut, IdsGoToTheirPart) {
  for (const std::int64_t num_parts : {1, 2, 5, 16, 17, 40}) {
    check_cut<std::int32_t>(num_parts);
    check_cut<std::int64_t>(num_parts);
  }
}

}  // namespace
}  // namespace tessera::kernels
