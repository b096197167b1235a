// A warm model predicts without asking for memory.

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "samples.h"

// Calls of operator new so far; counted_new.cpp has it.
long num_allocations();

namespace tessera::serving {
namespace {

TEST(ServingAllocations, AWarmModelAsksForNone) {
  for (const auto type : {embedding::RowType::kInt8, embedding::RowType::kInt4}) {
    const Folder folder;
    const SmallModel small;
    ExportOptions options;
    options.type = type;
    export_model(small, folder, options);
    Model model(folder / "pkg");
    const Samples many(small, 150);
    const Samples one(small, 1);
    const auto many_bags = many.bags(false);
    const auto one_bags = one.bags(false);
    std::vector<float> logits(150);
    const auto predict = [&] {
      model.lease().predict({150, many.dense, many_bags}, logits);
      model.lease().predict({1, one.dense, one_bags}, std::span(logits).first(1));
    };
    const long before = num_allocations();
    predict();
    EXPECT_GT(num_allocations(), before);  // the library's are counted
    const long warm = num_allocations();
    for (int i = 0; i < 100; ++i) predict();
    EXPECT_EQ(num_allocations(), warm);
  }
}

// What a warm-up is for: the first request of a size finds everything in place.
TEST(ServingAllocations, AModelThatWasWarmedUpAsksForNoneFromTheFirstRequestOn) {
  for (const bool is_cross : {false, true}) {
    const Folder folder;
    const SmallModel small(is_cross);
    export_model(small, folder);
    Model model(folder / "pkg");
    model.warm_up(std::int64_t{1} << 30, 200);
    for (const std::int64_t count : {200, 150, 64, 3, 1}) {
      const Samples samples(small, count);
      const auto bags = samples.bags(false);
      std::vector<float> logits(static_cast<std::size_t>(count));
      const long before = num_allocations();
      model.lease().predict({count, samples.dense, bags}, logits);
      EXPECT_EQ(num_allocations(), before) << count;
    }
  }
}

}  // namespace
}  // namespace tessera::serving
