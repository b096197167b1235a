#include "comm/call_exchange.h"

#include <gtest/gtest.h>

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <sstream>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/network.h"
#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using Exchanges = std::vector<std::unique_ptr<CallExchange>>;
using Words = std::vector<std::int64_t>;

constexpr const char* kHere = "127.0.0.1";
const CallExchange::Look kNoLook = [](std::span<const int>) {};

void run_threads(int size, const std::function<void(int rank)>& body) {
  std::vector<std::future<void>> ends;
  for (int rank = 0; rank < size; ++rank)
    ends.push_back(std::async(std::launch::async, body, rank));
  for (auto& end : ends) end.get();
}

core::Secret secret_of(char letter) {
  return core::Secret::from_text(std::string(40, letter), "the test");
}

Exchanges connected(int size, const std::optional<core::Secret>& secret = std::nullopt) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Exchanges exchanges(size);
  run_threads(size, [&](int rank) {
    exchanges[rank] = std::make_unique<CallExchange>(*store, rank, size, kHere, 20s, secret);
  });
  return exchanges;
}

Words gathered(CallExchange& exchange, const Words& mine, int size,
               const CallExchange::Look& look = kNoLook) {
  Words all(mine.size() * size, -1);
  exchange.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)).data(),
                      look);
  return all;
}

void announce_record(CallExchange& exchange, const Words& mine) {
  exchange.announce(std::as_bytes(std::span(mine)));
}

Words record(int rank, int turn, std::size_t length) {
  Words words(length);
  std::iota(words.begin(), words.end(), 1000000 * rank + 1000 * turn);
  return words;
}

// Where rank 0 listens, as soon as it says so.
std::pair<std::string, std::uint16_t> place_of_first(c10d::Store& store) {
  std::istringstream place(store.get_to_str("calls/0"));
  std::pair<std::string, std::uint16_t> result;
  place >> result.first >> result.second;
  return result;
}

class Sizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, Sizes, ::testing::Values(1, 2, 3, 4, 5, 8, 11));

TEST_P(Sizes, EveryRankGetsEveryRecord) {
  const int size = GetParam();
  const Exchanges exchanges = connected(size);
  run_threads(size, [&](int rank) {
    for (int turn = 0; turn < 50; ++turn) {
      // Ranks run ahead of each other by turns.
      if (turn % size == rank) std::this_thread::sleep_for(200us);
      const std::size_t length = turn % 7;
      Words expected;
      for (int r = 0; r < size; ++r) {
        const Words theirs = record(r, turn, length);
        expected.insert(expected.end(), theirs.begin(), theirs.end());
      }
      ASSERT_EQ(gathered(*exchanges[rank], record(rank, turn, length), size), expected);
    }
  });
}

TEST_P(Sizes, RecordsMayBeLargerThanWhatAConnectionHolds) {
  const int size = GetParam();
  constexpr std::size_t kLength = 1 << 20;  // 8 MiB
  const Exchanges exchanges = connected(size);
  run_threads(size, [&](int rank) {
    const Words all = gathered(*exchanges[rank], record(rank, 1, kLength), size);
    for (int r = 0; r < size; ++r) {
      EXPECT_EQ(all[r * kLength], 1000000 * r + 1000);
      EXPECT_EQ(all[(r + 1) * kLength - 1], 1000000 * r + 1000 + std::int64_t{kLength} - 1);
    }
  });
}

TEST_P(Sizes, RecordsMayBeAnnouncedBeforeTheirExchange) {
  const int size = GetParam();
  constexpr int kTurns = 60;
  const Exchanges exchanges = connected(size);
  const auto words_of = [](int rank, int turn) { return record(rank, turn, turn % 5); };
  const auto announce = [&](int rank, int turn) {
    announce_record(*exchanges[rank], words_of(rank, turn));
  };
  run_threads(size, [&](int rank) {
    // Rank 0 announces nothing, rank 1 all at once, the others a few while exchanges are under way.
    int num_announced = 0;
    for (int turn = 0; rank == 1 && turn < kTurns; ++turn) announce(rank, turn);
    for (int turn = 0; turn < kTurns; ++turn) {
      std::thread beside;
      if (rank > 1 && turn % (rank + 1) == 0) {
        num_announced = std::max(num_announced, turn);
        if (num_announced < kTurns) announce(rank, num_announced++);
        beside = std::thread([&] {
          for (int i = 0; i < rank && num_announced < kTurns; ++i) announce(rank, num_announced++);
        });
      }
      Words expected;
      for (int r = 0; r < size; ++r) {
        const Words theirs = words_of(r, turn);
        expected.insert(expected.end(), theirs.begin(), theirs.end());
      }
      EXPECT_EQ(gathered(*exchanges[rank], words_of(rank, turn), size), expected);
      if (beside.joinable()) beside.join();
    }
  });
}

TEST_P(Sizes, AnnouncementsMayBeMoreThanAConnectionHolds) {
  const int size = GetParam();
  constexpr int kTurns = 16;
  constexpr std::size_t kLength = 1 << 17;  // 1 MiB
  const Exchanges exchanges = connected(size);
  run_threads(size, [&](int rank) {
    for (int turn = 0; rank % 2 == 0 && turn < kTurns; ++turn) {
      announce_record(*exchanges[rank], record(rank, turn, kLength));
    }
    for (int turn = 0; turn < kTurns; ++turn) {
      const Words all = gathered(*exchanges[rank], record(rank, turn, kLength), size);
      for (int r = 0; r < size; ++r) {
        ASSERT_EQ(all[r * kLength], 1000000 * r + 1000 * turn);
        ASSERT_EQ(all[(r + 1) * kLength - 1],
                  1000000 * r + 1000 * turn + std::int64_t{kLength} - 1);
      }
    }
  });
}

TEST(CallExchange, AnAnnouncementOverAClosedConnectionLeavesTheErrorToTheExchange) {
  const Exchanges exchanges = connected(2);
  exchanges[0]->close();
  const Words mine{1};
  announce_record(*exchanges[0], mine);
  EXPECT_THROW(gathered(*exchanges[0], mine, 2), ConnectionLost);
  EXPECT_THROW(gathered(*exchanges[1], mine, 2), ConnectionLost);
}

TEST(CallExchange, MissingRanksAreNamed) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_threads(2, [&](int rank) {
    try {
      CallExchange(*store, rank, 3, kHere, 300ms);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRendezvous);
      EXPECT_EQ(error.ranks(), (std::vector<int>{2}));
      EXPECT_EQ(std::string(error.what()),
                "comm.init: rank 2 of 3 did not connect to rank " + std::to_string(rank) +
                    " within 0.3 s. Look whether they live, whether all have the same "
                    "TESSERA_CHECK_COLLECTIVES, and whether the network lets them through.");
    }
  });
}

class CallExchangeStrangers : public testing::TestWithParam<bool> {};

TEST_P(CallExchangeStrangers, AreRefusedAndNobodyListensAfterwards) {
  const std::optional<core::Secret> secret =
      GetParam() ? std::optional(secret_of('s')) : std::nullopt;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Exchanges exchanges(2);
  std::thread first(
      [&] { exchanges[0] = std::make_unique<CallExchange>(*store, 0, 2, kHere, 20s, secret); });
  const auto [host, port] = place_of_first(*store);
  const auto deadline = std::chrono::steady_clock::now() + 5s;
  const Socket silent = connect_to(host, port, deadline);
  const Socket loud = connect_to(host, port, deadline);
  const std::string words(48, 'x');
  ASSERT_EQ(::send(loud.get(), words.data(), words.size(), MSG_NOSIGNAL), 48);
  exchanges[1] = std::make_unique<CallExchange>(*store, 1, 2, kHere, 20s, secret);
  first.join();
  run_threads(
      2, [&](int rank) { EXPECT_EQ(gathered(*exchanges[rank], {rank + 7}, 2), (Words{7, 8})); });
  for (const Socket* stranger : {&silent, &loud}) {
    // Told at most a number, and that it is not the right one.
    std::string told;
    char letter = 0;
    while (::recv(stranger->get(), &letter, 1, 0) > 0) told += letter;
    EXPECT_LE(told.size(), GetParam() ? 72U : 0U);
  }
  try {
    connect_to(host, port, deadline);
    ADD_FAILURE() << "somebody listens";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), "comm.init: no connection to 127.0.0.1:" +
                                             std::to_string(port) + ": Connection refused.");
  }
}

INSTANTIATE_TEST_SUITE_P(All, CallExchangeStrangers, testing::Bool(), [](const auto& info) {
  return info.param ? "WithASecret" : "WithoutASecret";
});

TEST(CallExchange, RanksProveTheSecretToEachOther) {
  for (const int size : {2, 3, 5, 8}) {
    const Exchanges exchanges = connected(size, secret_of('s'));
    Words expected(size);
    std::iota(expected.begin(), expected.end(), 7);
    run_threads(size, [&](int rank) {
      for (int i = 0; i < 3; ++i) EXPECT_EQ(gathered(*exchanges[rank], {rank + 7}, size), expected);
    });
  }
}

TEST(CallExchange, ARankWithAnotherSecretIsNotConnected) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_threads(2, [&](int rank) {
    try {
      CallExchange(*store, rank, 2, kHere, 1s, secret_of(rank == 0 ? 's' : 't'));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRendezvous);
      EXPECT_EQ(error.ranks(), (std::vector<int>{1 - rank}));
    } catch (const ConnectionLost&) {
      // The other one has thrown first.
    }
  });
}

TEST(CallExchange, LooksAtThoseWhoseRecordsHaveNotCome) {
  const Exchanges exchanges = connected(4);
  std::vector<std::vector<int>> late(2);
  run_threads(2, [&](int rank) {
    EXPECT_THROW(gathered(*exchanges[rank], {rank}, 4,
                          [&](std::span<const int> ranks) {
                            late[rank].assign(ranks.begin(), ranks.end());
                            throw std::runtime_error("enough");
                          }),
                 std::runtime_error);
  });
  EXPECT_EQ(late[0], (std::vector<int>{2, 3}));  // has heard from rank 1
  EXPECT_EQ(late[1], (std::vector<int>{0, 2, 3}));
}

TEST(CallExchange, ClosingEndsExchangesHereAndWhereItsRecordIsMissed) {
  for (const int closed : {0, 1}) {
    const Exchanges exchanges = connected(3);
    std::atomic<int> num_looks{0};
    std::thread closer([&] {
      while (num_looks < 2) std::this_thread::sleep_for(1ms);
      exchanges[closed]->close();
    });
    // Rank 1 does not come: rank 0 misses its record in the first round, rank 2 in the second.
    run_threads(2, [&](int thread) {
      const int rank = 2 * thread;
      if (closed == 0 && rank == 2) return;
      try {
        gathered(*exchanges[rank], {rank}, 3, [&](std::span<const int>) { ++num_looks; });
        ADD_FAILURE() << "nothing was thrown";
      } catch (const ConnectionLost& lost) {
        EXPECT_STREQ(lost.what(), "the connection from rank 1 says: It was closed.");
      }
    });
    closer.join();
    EXPECT_THROW(gathered(*exchanges[closed], {1}, 3), ConnectionLost);
  }
}

TEST(CallExchange, ARankThatIsGoneIsNoticed) {
  Exchanges exchanges = connected(2);
  exchanges[1].reset();
  EXPECT_THROW(gathered(*exchanges[0], {1}, 2), ConnectionLost);
}

TEST(Network, AForeignAddressCannotBeListenedOn) {
  try {
    listen_on_free_port("192.0.2.1");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kRendezvous);
    EXPECT_STREQ(error.what(),
                 "comm.init: this rank cannot listen on 192.0.2.1: Cannot assign requested "
                 "address. Name the network interface towards the other ranks in "
                 "TESSERA_INTERFACE.");
  }
}

}  // namespace
}  // namespace tessera::comm
