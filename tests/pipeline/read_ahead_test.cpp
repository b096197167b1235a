// Reading in a thread: the same batches, in order, never more than asked for, and an end that is
// always clean.

#include "tessera/pipeline/read_ahead.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace tessera::pipeline {
namespace {

constexpr auto kNap = std::chrono::milliseconds(5);

/// 0, 1, … up to `count`, then nothing.
ReadAhead<int>::Source numbers(int count, std::atomic<int>& num_read) {
  return [count, &num_read]() -> std::optional<int> {
    if (num_read == count) return std::nullopt;
    return num_read++;
  };
}

std::vector<int> all_of(ReadAhead<int>& ahead) {
  std::vector<int> seen;
  while (auto number = ahead.next()) seen.push_back(*number);
  return seen;
}

TEST(ReadAhead, GivesTheBatchesOfTheSourceInOrder) {
  for (const int count : {0, 1, 2, 3, 1000}) {
    for (const std::size_t depth : {0, 1, 2, 7}) {  // 0 is as 1
      std::atomic<int> num_read = 0;
      ReadAhead<int> ahead(numbers(count, num_read), depth);
      const std::vector<int> seen = all_of(ahead);
      ASSERT_EQ(static_cast<int>(seen.size()), count);
      for (int i = 0; i < count; ++i) ASSERT_EQ(seen[static_cast<std::size_t>(i)], i);
      EXPECT_FALSE(ahead.next());  // and ever after
    }
  }
}

TEST(ReadAhead, ReadsWhileNobodyAsksAndNoFurtherThanItsDepth) {
  for (const int depth : {1, 3}) {
    std::atomic<int> num_read = 0;
    ReadAhead<int> ahead(numbers(1000, num_read), static_cast<std::size_t>(depth));
    while (num_read < depth) std::this_thread::sleep_for(kNap);
    std::this_thread::sleep_for(kNap);
    EXPECT_EQ(num_read, depth);
    EXPECT_EQ(ahead.next(), 0);
    while (num_read < depth + 1) std::this_thread::sleep_for(kNap);
    std::this_thread::sleep_for(kNap);
    EXPECT_EQ(num_read, depth + 1);
  }
}

TEST(ReadAhead, AnErrorComesInTheCallersThreadAfterTheBatchesBeforeIt) {
  int num_read = 0;
  ReadAhead<int> ahead(
      [&]() -> std::optional<int> {
        if (num_read == 3) throw std::runtime_error("clicks.click: block 7 is damaged");
        return num_read++;
      },
      /*depth=*/8);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ahead.next(), i);
  for (int again = 0; again < 2; ++again) {
    try {
      (void)ahead.next();
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()), "clicks.click: block 7 is damaged");
    }
  }
}

TEST(ReadAhead, CanBeDestroyedAtAnyTime) {
  for (const int num_asked : {0, 1, 5}) {
    std::atomic<int> num_read = 0;
    std::atomic<int> num_after = 0;
    std::atomic<bool> is_gone = false;
    {
      const auto source = numbers(1000000, num_read);
      ReadAhead<int> ahead(
          [&] {
            if (is_gone) ++num_after;
            return source();
          },
          2);
      for (int i = 0; i < num_asked; ++i) (void)ahead.next();
      if (num_asked == 5) {  // while it is full, and not while it reads
        while (num_read < 7) std::this_thread::sleep_for(kNap);
      }
    }
    is_gone = true;
    std::this_thread::sleep_for(kNap);
    EXPECT_EQ(num_after, 0);
    EXPECT_LE(num_read, num_asked + 2);
  }
}

TEST(ReadAhead, LetsGoOfBatchesNobodyAskedFor) {
  const auto counted = std::make_shared<int>(0);
  {
    ReadAhead<std::shared_ptr<int>> ahead([&] { return std::optional(counted); }, 4);
    while (counted.use_count() < 5) std::this_thread::sleep_for(kNap);
  }
  EXPECT_EQ(counted.use_count(), 1);
}

}  // namespace
}  // namespace tessera::pipeline
