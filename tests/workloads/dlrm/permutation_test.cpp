// Orders of samples: every one once, another for another seed; and samples gathered in any order.

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "files_fixture.h"
#include "trainer/permutation.h"

namespace {

using namespace tessera::workloads::dlrm;
using tessera::trainer::Permutation;

TEST(Permutation, HasEveryPlaceOnce) {
  for (const std::int64_t size : {1, 2, 3, 4, 5, 15, 16, 17, 1000, 65537}) {
    const Permutation order(size, 7);
    std::vector<int> seen(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) ++seen.at(static_cast<std::size_t>(order(i)));
    for (const int count : seen) ASSERT_EQ(count, 1) << size;
  }
}

TEST(Permutation, LeavesFewPlacesAndNeighboursAsTheyWere) {
  constexpr std::int64_t kSize = 10000;
  const Permutation one(kSize, 1);
  const Permutation other(kSize, 2);
  int same_place = 0;
  int same_order = 0;
  int neighbours = 0;
  for (std::int64_t i = 0; i + 1 < kSize; ++i) {
    same_place += one(i) == i ? 1 : 0;
    same_order += one(i) == other(i) ? 1 : 0;
    neighbours += one(i + 1) == one(i) + 1 ? 1 : 0;
  }
  // By chance one is expected of each; ten would happen once in ten million orders.
  EXPECT_LT(same_place, 10);
  EXPECT_LT(same_order, 10);
  EXPECT_LT(neighbours, 10);
}

TEST(Gather, IsReadingOneByOne) {
  const SyntheticLog log(mixed_options());
  const std::vector<std::int64_t> samples{7, 3, 900, 7};
  SampleBlock block;
  log.gather(samples, block);
  EXPECT_EQ(block.num_samples, 4);
  std::vector<std::size_t> places;  // where the ids of a feature begin
  std::size_t place = 0;
  for (std::size_t f = 0; f < 3; ++f) {
    places.push_back(place);
    for (std::size_t s = 0; s < 4; ++s) place += static_cast<std::size_t>(block.lengths[f * 4 + s]);
  }
  EXPECT_EQ(place, block.ids.size());
  SampleBlock one;
  for (std::size_t s = 0; s < samples.size(); ++s) {
    log.read(samples[s], 1, one);
    EXPECT_EQ(block.labels[s], one.labels[0]);
    for (std::size_t d = 0; d < 3; ++d) EXPECT_EQ(block.dense[s * 3 + d], one.dense[d]);
    std::size_t next = 0;
    for (std::size_t f = 0; f < 3; ++f) {
      ASSERT_EQ(block.lengths[f * 4 + s], one.lengths[f]);
      for (std::int32_t i = 0; i < one.lengths[f]; ++i) {
        EXPECT_EQ(block.ids[places[f]++], one.ids[next++]);
      }
    }
  }
}

}  // namespace
