// A rank that dies, stalls, aborts or cannot get shared memory: the others know, and nothing stays.

#include <gtest/gtest.h>

#include <signal.h>
#include <sys/mount.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/shm/handover.h"
#include "comm/shm/segment.h"
#include "group_fixture.h"
#include "support/sanitizers.h"

namespace tessera::comm::shm::testing {
namespace {

using std::chrono::milliseconds;

Call sum_call(std::uint64_t sequence) {
  return call_of(Operator::kAllReduce, DataType::kFloat32, ReduceOp::kSum, -1, sequence);
}

ShmOptions in_directory(const std::string& directory) {
  ShmOptions options;
  options.directory = directory;
  return options;
}

/// Rank `victim` dies by SIGKILL in or before its 20th all-reduce of `count` elements.
void check_kill(int size, int victim, std::int64_t count, bool heap) {
  const TemporaryDirectory directory;
  const auto outcomes = run_processes(size, in_directory(directory.path()), [&](auto& transport) {
    const std::size_t bytes = static_cast<std::size_t>(count) * 4;
    std::vector<std::byte> memory(heap ? 0 : bytes);
    const auto block = heap ? transport.allocate(bytes) : nullptr;
    const Piece data{heap ? block.get() : memory.data(), count};
    std::thread killer;
    for (std::uint64_t i = 0;; ++i) {
      if (i == 20 && transport.rank() == victim) {
        // Somewhere inside a collective.
        killer = std::thread([] {
          usleep(300);
          kill(getpid(), SIGKILL);
        });
      }
      transport.all_reduce(sum_call(i), data);
    }
  });
  std::string text;
  for (int rank = 0; rank < size; ++rank) {
    const Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_EQ(outcome.was_killed, rank == victim);
    if (rank == victim) continue;
    if (text.empty()) text = outcome.text;
    EXPECT_EQ(outcome.text, text);
    EXPECT_NE(outcome.text.find(": rank " + std::to_string(victim) + " ended."), std::string::npos)
        << outcome.text;
    if (!tessera::testing::kIsSanitized) {
      EXPECT_LT(outcome.seconds, 1.5);
    }
  }
  EXPECT_TRUE(directory.entries().empty());
}

TEST(PeerDeath, InSmallCollectives) { check_kill(3, 1, 10, false); }
TEST(PeerDeath, InLargeCollectives) { check_kill(3, 2, 3000000, false); }
TEST(PeerDeath, OfRankZero) { check_kill(2, 0, 3000000, false); }
TEST(PeerDeath, InZeroCopyCollectives) { check_kill(2, 1, 3000000, true); }

TEST(PeerDeath, OfAllRanksLeavesNothing) {
  const TemporaryDirectory directory;
  const auto outcomes = run_processes(3, in_directory(directory.path()), [](auto& transport) {
    transport.barrier(call_of(Operator::kBarrier));
    kill(getpid(), SIGKILL);
  });
  for (const Outcome& outcome : outcomes) EXPECT_TRUE(outcome.was_killed);
  EXPECT_TRUE(directory.entries().empty());
}

TEST(PeerDeath, WhileSendingIsSeenByTheReceiver) {
  const auto outcomes = run_processes(2, {}, [](auto& transport) {
    float value = 0;
    if (transport.rank() == 0) transport.recv(call_of(Operator::kRecv), {&value, 1}, 1, 0);
    kill(getpid(), SIGKILL);
  });
  EXPECT_EQ(outcomes[0].text, "comm.recv #1: rank 1 ended.");
  EXPECT_LT(outcomes[0].seconds, 1.0);
}

TEST(Stall, EndsAtTheDeadlineEvenIfTheMonitorDoesNot) {
  const auto texts = texts_of_threads(2, {}, [](ShmTransport& transport) {
    if (transport.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(250));
      transport.barrier(call_of(Operator::kBarrier));
      return;
    }
    Call call = sum_call(7);
    call.deadline = Clock::now() + milliseconds(100);
    float value = 0;
    transport.all_reduce(call, {&value, 1});
  });
  EXPECT_EQ(texts[0].rfind("comm.all_reduce #7: no answer from rank 1 in 0.1 s.", 0), 0U)
      << texts[0];
  EXPECT_EQ(texts[1], texts[0]);
}

TEST(Abort, EndsEveryWaitOfEveryRank) {
  std::atomic<int> waiting{0};
  const auto begin = Clock::now();
  const auto texts = texts_of_threads(4, {}, [&](ShmTransport& transport) {
    float value = 0;
    ++waiting;
    switch (transport.rank()) {
      case 0:
        transport.barrier(call_of(Operator::kBarrier));
        break;
      case 1:
        transport.recv(call_of(Operator::kRecv), {&value, 1}, -1, 3);
        break;
      case 2: {
        std::vector<float> large(4 << 20);
        transport.send(call_of(Operator::kSend), {large.data(), 4 << 20}, 1, 9);
        break;
      }
      default:
        while (waiting < 4) usleep(1000);
        usleep(60000);
        transport.abort(FailureKind::kAborted, {3}, "comm.abort: rank 3 gave up.");
        transport.abort(FailureKind::kTimeout, {1}, "a second reason that comes too late");
        transport.barrier(call_of(Operator::kBarrier));
    }
  });
  EXPECT_EQ(texts[0], "comm.abort: rank 3 gave up.");
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[3], texts[0]);
  EXPECT_LT(Clock::now() - begin, milliseconds(900));
}

TEST(Abort, KindAndRanksReachEveryRank) {
  run_threads(3, {}, [](ShmTransport& transport) {
    try {
      if (transport.rank() == 2) {
        transport.abort(FailureKind::kPeerFailed, {2}, "comm: rank 2 threw.");
      }
      transport.barrier(call_of(Operator::kBarrier));
      FAIL();
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.kind(), FailureKind::kPeerFailed);
      EXPECT_EQ(failure.ranks(), std::vector<int>{2});
      EXPECT_STREQ(failure.what(), "comm: rank 2 threw.");
    }
  });
}

TEST(Abort, LongReasonsAreCut) {
  const auto texts = texts_of_threads(2, {}, [](ShmTransport& transport) {
    if (transport.rank() == 0) {
      transport.abort(FailureKind::kAborted, {}, std::string(100000, 'x'));
    }
    transport.barrier(call_of(Operator::kBarrier));
  });
  EXPECT_EQ(texts[0], std::string(FailureRecord::kMaxText, 'x'));
  EXPECT_EQ(texts[1], texts[0]);
}

TEST(Creation, FailsAlikeOnAllRanksWithoutADirectory) {
  const auto texts = texts_of_threads(3, in_directory("/nowhere/at/all"), [](auto&) {});
  EXPECT_EQ(texts[0],
            "comm.shm: cannot make a segment in /nowhere/at/all: No such file or directory. Set "
            "TESSERA_SHM_DIR to a directory in memory that can be written.");
  for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
}

TEST(Creation, FailsAlikeOnAllRanksInATinyDirectory) {
  const TemporaryDirectory directory;
  if (mount("tmpfs", directory.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
    GTEST_SKIP() << "mounting a tmpfs needs privileges";
  }
  const auto texts = texts_of_threads(3, in_directory(directory.path()), [](auto&) {});
  EXPECT_NE(texts[0].find("MiB in " + directory.path() +
                          " (1.0 MiB free): No space left on "
                          "device. Enlarge it, in a container with --shm-size, or set "
                          "TESSERA_SHM_DIR."),
            std::string::npos)
      << texts[0];
  for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
  EXPECT_TRUE(directory.entries().empty());
  umount(directory.path().c_str());
}

/// Rank `victim` of three ends while the others make the group.
void check_death_in_creation(int victim) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    const auto outcomes = run_processes(
        3, {}, [](auto&) {},
        [&](int rank, Bootstrap& bootstrap) {
          if (rank != victim) return;
          if (victim == 0 && repeat % 2 == 1)
            bootstrap.set("shm/segment", "ok " + Listener().name());
          usleep(static_cast<useconds_t>(repeat * 500));
          kill(getpid(), SIGKILL);
        });
    for (int rank = 0; rank < 3; ++rank) {
      const Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      EXPECT_EQ(outcome.was_killed, rank == victim);
      if (rank == victim) continue;
      EXPECT_EQ(outcome.text, "comm.init: rank " + std::to_string(victim) + " ended.");
      EXPECT_LT(outcome.seconds, 1.0);
    }
  }
}

TEST(PeerDeath, WhileTheGroupIsMadeIsNamedByAll) { check_death_in_creation(1); }
TEST(PeerDeath, OfRankZeroWhileTheGroupIsMadeIsNamedByAll) { check_death_in_creation(0); }

/// Rank 0 gives up, says why and ends, all between two looks of rank 1.
class GoesAtOnce final : public WaitMonitor {
 public:
  explicit GoesAtOnce(std::function<void()> tell) : tell_(std::move(tell)) {}
  void check(const Call&, std::span<const int>, Clock::duration) override {}
  void check_creation(std::span<const int>) override {
    tell_();
    throw Failure(FailureKind::kPeerLost, {0}, "comm.init: rank 0 ended.");
  }

 private:
  std::function<void()> tell_;
};

std::string text_of_rank_1(Bootstrap& bootstrap, std::function<void()> tell) {
  GoesAtOnce monitor(std::move(tell));
  ShmOptions options;
  options.deadline = Clock::now() + std::chrono::seconds(20);
  try {
    ShmTransport::create(1, 3, bootstrap, monitor, options);
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

TEST(Creation, WhatRankZeroSaidBeforeItEndedIsTheReason) {
  const std::string verdict = "failed " + std::to_string(static_cast<int>(FailureKind::kPeerLost)) +
                              " 4 comm.init: rank 2 ended.";
  {
    const TemporaryDirectory keys;  // before there was a segment
    FileBootstrap bootstrap(keys.path());
    EXPECT_EQ(text_of_rank_1(bootstrap, [&] { bootstrap.set("shm/segment", verdict); }),
              "comm.init: rank 2 ended.");
  }
  {
    const TemporaryDirectory keys;  // to all who had come
    FileBootstrap bootstrap(keys.path());
    Listener listener;
    bootstrap.set("shm/segment", "ok " + listener.name());
    std::optional<Line> line;
    EXPECT_EQ(text_of_rank_1(bootstrap,
                             [&] {
                               line = listener.accept();
                               line->send(verdict);
                             }),
              "comm.init: rank 2 ended.");
  }
  {
    const TemporaryDirectory keys;  // to those it did not know yet
    FileBootstrap bootstrap(keys.path());
    Listener listener;
    bootstrap.set("shm/segment", "ok " + listener.name());
    EXPECT_EQ(text_of_rank_1(bootstrap, [&] { bootstrap.set("shm/verdict", verdict); }),
              "comm.init: rank 2 ended.");
  }
  {
    const TemporaryDirectory keys;  // it said nothing
    FileBootstrap bootstrap(keys.path());
    EXPECT_EQ(text_of_rank_1(bootstrap, [] {}), "comm.init: rank 0 ended.");
  }
}

TEST(Creation, ARankThatDoesNotComeIsATimeoutForAll) {
  const TemporaryDirectory keys;
  std::vector<std::string> texts(2);
  std::vector<std::thread> threads;
  for (const int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      FileBootstrap bootstrap(keys.path());
      TestMonitor monitor;
      ShmOptions options;
      options.deadline = Clock::now() + milliseconds(200);
      try {
        ShmTransport::create(rank, 3, bootstrap, monitor, options);
      } catch (const Failure& failure) {
        EXPECT_EQ(failure.kind(), FailureKind::kTimeout);
        texts[static_cast<std::size_t>(rank)] = failure.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(texts[0], "comm.shm: rank 2 did not come for the group's segment in time.");
  EXPECT_EQ(texts[1], texts[0]);
}

/// Number of entries of a directory of /proc/self.
int count_of(const char* directory) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    (void)entry;
    ++count;
  }
  return count;
}

TEST(Lifecycle, TwoHundredGroupsLeaveNothingBehind) {
  const TemporaryDirectory directory;
  ShmOptions options = in_directory(directory.path());
  options.ring_bytes = 64 * 1024;
  const auto cycle = [&] {
    run_threads(2, options, [](ShmTransport& transport) {
      const auto block = transport.allocate(10000);
      transport.barrier(call_of(Operator::kBarrier));
    });
  };
  cycle();
  const int files = count_of("/proc/self/fd");
  const int threads = count_of("/proc/self/task");
  for (int i = 0; i < 200; ++i) cycle();
  EXPECT_EQ(count_of("/proc/self/fd"), files);
  EXPECT_EQ(count_of("/proc/self/task"), threads);
  EXPECT_TRUE(directory.entries().empty());
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    EXPECT_EQ(line.find(directory.path()), std::string::npos) << line;
  }
}

TEST(Lifecycle, ASegmentNeverHasAName) {
  const TemporaryDirectory directory;
  run_threads(2, in_directory(directory.path()), [&](ShmTransport& transport) {
    EXPECT_TRUE(directory.entries().empty());
    transport.barrier(call_of(Operator::kBarrier));
  });
}

}  // namespace
}  // namespace tessera::comm::shm::testing
