// Memory that peers read where it lies: when a block is written again, and when it is not.

#include "comm/lent_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "group_fixture.h"

namespace tessera::comm::shm::testing {
namespace {

constexpr std::size_t kBytes = 10000;

ShmOptions with_heap(std::size_t bytes) {
  ShmOptions options = small_options();
  options.heap_bytes = bytes;
  return options;
}

TEST(LentMemory, AFreeBlockIsTakenAgain) {
  run_threads(1, with_heap(std::size_t{8} << 20), [](ShmTransport& transport) {
    const auto memory = std::make_shared<LentMemory>();
    auto first = memory->take(transport, kBytes);
    ASSERT_NE(first, nullptr);
    const void* place = first.get();
    auto second = memory->take(transport, kBytes);
    EXPECT_NE(second.get(), place);
    first.reset();
    EXPECT_EQ(memory->take(transport, kBytes - 100).get(), place);
    EXPECT_EQ(memory->num_blocks(), 2U);
  });
}

TEST(LentMemory, ABlockThatIsReadIsNotTaken) {
  run_threads(1, with_heap(std::size_t{8} << 20), [](ShmTransport& transport) {
    const auto memory = std::make_shared<LentMemory>();
    auto block = memory->take(transport, kBytes);
    const void* place = block.get();
    std::memset(block.get(), 7, kBytes);
    auto* inside = static_cast<std::byte*>(block.get()) + 100;
    const std::uint64_t readers = memory->lend(transport, inside, 50, 2);
    ASSERT_NE(readers, 0U);
    auto one = LentMemory::borrow(transport, transport.place_of(inside, 50), 50, readers);
    auto other = LentMemory::borrow(transport, transport.place_of(inside, 50), 50, readers);
    EXPECT_EQ(one.get(), inside);
    block.reset();
    EXPECT_NE(memory->take(transport, kBytes).get(), place);
    one.reset();
    EXPECT_NE(memory->take(transport, kBytes).get(), place);
    other.reset();
    bool is_taken = false;
    std::vector<std::shared_ptr<void>> taken;
    for (int i = 0; i < 3; ++i) {
      taken.push_back(memory->take(transport, kBytes));
      is_taken |= taken.back().get() == place;
    }
    EXPECT_TRUE(is_taken);
  });
}

TEST(LentMemory, ReadersThatWereNeverToldAreTakenBack) {
  run_threads(1, with_heap(std::size_t{8} << 20), [](ShmTransport& transport) {
    const auto memory = std::make_shared<LentMemory>();
    auto block = memory->take(transport, kBytes);
    const void* place = block.get();
    ASSERT_NE(memory->lend(transport, block.get(), kBytes, 1), 0U);
    memory->take_back(block.get(), kBytes, 1);
    block.reset();
    EXPECT_EQ(memory->take(transport, kBytes).get(), place);
  });
}

TEST(LentMemory, OtherMemoryIsNotLent) {
  run_threads(1, with_heap(std::size_t{8} << 20), [](ShmTransport& transport) {
    const auto memory = std::make_shared<LentMemory>();
    const auto block = memory->take(transport, kBytes);
    std::vector<std::byte> own(kBytes);
    EXPECT_EQ(memory->lend(transport, own.data(), kBytes, 1), 0U);
    EXPECT_EQ(memory->lend(transport, block.get(), kBytes + 1, 1), 0U);
    EXPECT_EQ(memory->lend(transport, transport.allocate(kBytes).get(), kBytes, 1), 0U);
    EXPECT_EQ(memory->take(transport, 0), nullptr);
  });
}

TEST(LentMemory, WithoutRoomThereIsNone) {
  run_threads(1, with_heap(0), [](ShmTransport& transport) {
    EXPECT_EQ(std::make_shared<LentMemory>()->take(transport, kBytes), nullptr);
  });
}

TEST(LentMemory, BlocksOfOtherSizesGoBack) {
  run_threads(1, with_heap(std::size_t{64} << 20), [](ShmTransport& transport) {
    const auto memory = std::make_shared<LentMemory>();
    for (std::size_t i = 1; i < 14; ++i) memory->take(transport, std::size_t{1000} << i);
    EXPECT_LE(memory->num_blocks(), 5U);
  });
}

TEST(LentMemory, OutlivesItsTransport) {
  std::shared_ptr<void> kept;
  std::shared_ptr<void> borrowed;
  run_threads(1, with_heap(std::size_t{8} << 20), [&](ShmTransport& transport) {
    const auto memory = std::make_shared<LentMemory>();
    kept = memory->take(transport, kBytes);
    std::memset(kept.get(), 9, kBytes);
    const std::uint64_t readers = memory->lend(transport, kept.get(), kBytes, 1);
    borrowed =
        LentMemory::borrow(transport, transport.place_of(kept.get(), kBytes), kBytes, readers);
  });
  EXPECT_EQ(static_cast<unsigned char*>(borrowed.get())[kBytes - 1], 9);
  kept.reset();
  borrowed.reset();
}

// Every rank lends the other a block per turn and reads what it is lent, slowly and quickly.
TEST(LentMemory, ProcessesReadWhatWasLent) {
  const auto outcomes = run_processes(2, with_heap(std::size_t{64} << 20), [](ShmTransport& rank) {
    const auto memory = std::make_shared<LentMemory>();
    std::vector<std::shared_ptr<void>> held;
    for (int turn = 0; turn < 200; ++turn) {
      auto block = memory->take(rank, kBytes);
      std::memset(block.get(), turn + rank.rank(), kBytes);
      std::int64_t words[2] = {
          static_cast<std::int64_t>(rank.place_of(block.get(), kBytes)),
          static_cast<std::int64_t>(memory->lend(rank, block.get(), kBytes, 1))};
      std::int64_t all[4];
      const std::vector<Piece> pieces{{all, 2}, {all + 2, 2}};
      rank.all_gather(call_of(Operator::kAllGather, DataType::kInt64, std::nullopt, -1,
                              static_cast<std::uint64_t>(turn) + 1),
                      {words, 2}, pieces);
      const int peer = 1 - rank.rank();
      held.push_back(LentMemory::borrow(rank, static_cast<std::uint64_t>(all[2 * peer]), kBytes,
                                        static_cast<std::uint64_t>(all[2 * peer + 1])));
      // Some are read several turns later.
      if (turn % 5 != 4 && rank.rank() == 0) continue;
      int first = turn - static_cast<int>(held.size()) + 1;
      for (const auto& lent : held) {
        const auto* bytes = static_cast<const unsigned char*>(lent.get());
        const auto expected = static_cast<unsigned char>(first++ + peer);
        for (std::size_t i = 0; i < kBytes; ++i) {
          if (bytes[i] != expected) throw std::runtime_error("a lent block was written");
        }
      }
      held.clear();
    }
    if (memory->num_blocks() > 8) throw std::runtime_error("blocks are not taken again");
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");
}

}  // namespace
}  // namespace tessera::comm::shm::testing
