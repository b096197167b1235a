// Large tensors find the memory of earlier ones.

#include "core/kept_memory.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include <ATen/ATen.h>

namespace tessera::core {
namespace {

constexpr std::int64_t kMebi = std::int64_t{1} << 20;

TEST(KeptMemory, TheNextTensorOfThatSizeGetsTheSameMemory) {
  at::Tensor first = empty_kept({5, kMebi}, at::kFloat);
  first.fill_(3);
  const void* place = first.data_ptr();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(place) % (2 * kMebi), 0);
  const std::size_t before = kept_bytes();
  first = at::Tensor();
  EXPECT_EQ(kept_bytes(), before + 20 * kMebi);
  const at::Tensor again = empty_kept({kMebi, 4}, at::kFloat);  // a little less is as good
  EXPECT_EQ(again.data_ptr(), place);
  EXPECT_EQ(kept_bytes(), before);
  const at::Tensor other = empty_kept({5, kMebi}, at::kFloat);
  EXPECT_NE(other.data_ptr(), place);
}

TEST(KeptMemory, MuchLargerMemoryIsLeftForLargerTensors) {
  const void* place = nullptr;
  {
    const at::Tensor large = empty_kept({64 * kMebi}, at::kByte);
    place = large.data_ptr();
  }
  const at::Tensor small = empty_kept({8 * kMebi}, at::kByte);
  EXPECT_NE(small.data_ptr(), place);
}

TEST(KeptMemory, KeepsNoMoreThanItsLimit) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 20; ++i) tensors.push_back(empty_kept({16 * kMebi}, at::kByte));
  tensors.clear();
  EXPECT_EQ(kept_bytes(), kMostKeptBytes);
  {
    const at::Tensor larger_than_all = empty_kept({300 * kMebi}, at::kByte);
  }
  EXPECT_LE(kept_bytes(), kMostKeptBytes);
}

TEST(KeptMemory, SmallTensorsAndOtherShapesAreOrdinary) {
  const std::size_t before = kept_bytes();
  {
    const at::Tensor small = empty_kept({100}, at::kDouble);
  }
  {
    const at::Tensor none = empty_kept({0, 7}, at::kFloat);
  }
  EXPECT_EQ(kept_bytes(), before);
  at::Tensor large = empty_kept({3, kMebi}, at::TensorOptions(at::kInt).requires_grad(false));
  EXPECT_EQ(large.scalar_type(), at::kInt);
  EXPECT_TRUE(large.is_contiguous());
  large.fill_(7);
  large.resize_({6, kMebi});
  EXPECT_EQ(large[2][5].item<int>(), 7);
  EXPECT_EQ(large.size(0), 6);
}

TEST(KeptMemory, ThreadsDoNotShareATensor) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 50; ++i) {
        const at::Tensor own = empty_kept({kMebi}, at::kInt).fill_(t * 100 + i);
        EXPECT_TRUE(own.eq(t * 100 + i).all().item<bool>());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(KeptMemory, OneTensorLargerThanTheLimitFindsTheMemoryOfTheLast) {
  const auto large = [](std::int64_t size) { return empty_kept_last({size * kMebi}, at::kByte); };
  const void* place = nullptr;
  {
    const at::Tensor first = large(300);
    place = first.data_ptr();
  }
  const std::size_t kept = kept_bytes();
  {
    const at::Tensor again = large(300);
    EXPECT_EQ(again.data_ptr(), place);
    EXPECT_EQ(kept_bytes(), kept - 300 * kMebi);
    const at::Tensor beside = large(302);
    EXPECT_NE(beside.data_ptr(), place);
  }
  EXPECT_EQ(kept_bytes() % (2 * kMebi), 0);
  EXPECT_LE(kept_bytes(), kept + 2 * kMebi);  // one of the two
  {
    const at::Tensor much_smaller = large(16);
    EXPECT_EQ(kept_bytes(), kept - 300 * kMebi);  // what does not suit it is gone
  }
  EXPECT_EQ(kept_bytes(), kept - 284 * kMebi);
  const at::Tensor small = empty_kept_last({3}, at::kFloat);
  EXPECT_EQ(small.numel(), 3);
}

}  // namespace
}  // namespace tessera::core
