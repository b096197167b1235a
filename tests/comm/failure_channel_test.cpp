#include "comm/failure_channel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using Ranks = std::vector<int>;

// The channels of three ranks, in one process.
class Channels : public ::testing::Test {
 protected:
  Channels() {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    for (int rank = 0; rank < 3; ++rank) {
      channels_.push_back(std::make_unique<FailureChannel>(store, rank, 3, "127.0.0.1"));
    }
    for (auto& channel : channels_) channel->meet(*store);
  }

  // What rank 0 is told about collective 7, as soon as it is `expected`, else after 10 s; the ranks
  // `others` wait there too, without asking.
  Ranks roll(const Ranks& others, const Ranks& expected) {
    std::optional<Ranks> told;
    const auto limit = Clock::now() + 10s;
    while (told != expected && Clock::now() < limit) {
      for (const int rank : others) wait_in(rank, 7, false);
      told = wait_in(0, 7, true);
      std::this_thread::sleep_for(10ms);
    }
    return told.value_or(Ranks{-1});
  }
  std::optional<Ranks> wait_in(int rank, std::uint64_t sequence, bool asks) {
    FailureChannel& channel = *channels_.at(static_cast<std::size_t>(rank));
    EXPECT_FALSE(channel.poll());
    return channel.call_roll(sequence, asks);
  }

  std::vector<std::unique_ptr<FailureChannel>> channels_;
};

TEST_F(Channels, NobodyIsNamedBeforeTheStoreHasTold) {
  EXPECT_EQ(channels_[0]->call_roll(7, true), std::nullopt);
  EXPECT_EQ(roll({}, {1, 2}), (Ranks{1, 2}));
  EXPECT_EQ(channels_[0]->call_roll(8, true), std::nullopt);
}

// Whoever asks first is not told that nobody is there: the others have to hear of it first.
TEST_F(Channels, WhoIsThereIsNeverNamed) {
  bool is_told = false;
  for (const auto limit = Clock::now() + 500ms; Clock::now() < limit;) {
    for (const int rank : {1, 2}) wait_in(rank, 7, false);
    const std::optional<Ranks> told = wait_in(0, 7, true);
    EXPECT_EQ(told.value_or(Ranks{}), Ranks{});
    is_told |= told.has_value();
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_TRUE(is_told);
}

TEST_F(Channels, WhoCameAMomentAgoAnswersWithoutAsking) {
  EXPECT_EQ(roll({}, {1, 2}), (Ranks{1, 2}));
  EXPECT_EQ(roll({1}, {2}), (Ranks{2}));
  EXPECT_EQ(roll({1, 2}, {}), (Ranks{}));
}

TEST_F(Channels, WhoIsFurtherHasDoneItsPart) {
  const auto limit = Clock::now() + 10s;
  std::optional<Ranks> told;
  while (told != Ranks{2} && Clock::now() < limit) {
    wait_in(1, 9, true);  // asks about a later one meanwhile
    told = wait_in(0, 7, true);
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_EQ(told, Ranks{2});
}

// All are there, and one of them stands still: on another host nothing else tells which.
TEST_F(Channels, WhoStopsInTheMiddleIsNamed) {
  EXPECT_EQ(roll({1, 2}, {}), (Ranks{}));
  EXPECT_EQ(roll({1}, {2}), (Ranks{2}));
  EXPECT_EQ(roll({1, 2}, {}), (Ranks{}));
}

// A store that is gone from some moment on, as one whose host has left.
class EndingStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    if (is_gone) throw std::runtime_error("gone");
    return c10d::HashStore::check(keys);
  }
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
  }
  std::atomic<bool> is_gone{false};
};

// Who was late when the store was last heard may have come since.
TEST(FailureChannel, NobodyIsNamedOnceTheStoreIsGone) {
  const auto store = c10::make_intrusive<EndingStore>();
  FailureChannel channel(store, 0, 2, "127.0.0.1");
  channel.meet(*store);
  const auto told = [&](const std::optional<Ranks>& expected) {
    std::optional<Ranks> told;
    const auto limit = Clock::now() + 10s;
    do {
      EXPECT_FALSE(channel.poll());
      told = channel.call_roll(7, true);
      std::this_thread::sleep_for(10ms);
    } while (told != expected && Clock::now() < limit);
    return told;
  };
  EXPECT_EQ(told(Ranks{1}), Ranks{1});
  store->is_gone = true;
  EXPECT_EQ(told(std::nullopt), std::nullopt);
}

}  // namespace
}  // namespace tessera::comm
