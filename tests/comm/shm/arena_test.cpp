// Memory from allocate(): alignment, reuse, limits, lifetime, and that the peers can reach it.

#include <gtest/gtest.h>

#include <sys/mount.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "comm/shm/arena.h"
#include "group_fixture.h"

namespace tessera::comm::shm::testing {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::shared_ptr<Arena> arena_of(const TemporaryDirectory& directory, std::size_t bytes) {
  return std::make_shared<Arena>(Segment::create(directory.path(), 4096, 2 * kMiB + bytes),
                                 2 * kMiB, bytes);
}

std::uintptr_t address_of(const std::shared_ptr<void>& block) {
  return reinterpret_cast<std::uintptr_t>(block.get());
}

TEST(Arena, BlocksStartAtPagesAndDoNotOverlap) {
  const TemporaryDirectory directory;
  const auto arena = arena_of(directory, 16 * kMiB);
  std::vector<std::shared_ptr<void>> blocks;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{4097}, 3 * kMiB}) {
    blocks.push_back(arena->allocate(bytes));
    ASSERT_NE(blocks.back(), nullptr);
    EXPECT_EQ(address_of(blocks.back()) % 4096, 0U);
    std::memset(blocks.back().get(), static_cast<int>(blocks.size()), bytes);
  }
  EXPECT_EQ(static_cast<unsigned char*>(blocks[1].get())[0], 2);
  EXPECT_EQ(static_cast<unsigned char*>(blocks[2].get())[4096], 3);
}

TEST(Arena, BucketsOfSomeMegabytesLieCloseTogether) {
  const TemporaryDirectory directory;
  const auto arena = arena_of(directory, 64 * kMiB);
  const std::size_t bytes = 4 * kMiB + 4100;  // a bucket is rarely a number of huge pages
  std::vector<std::shared_ptr<void>> blocks;
  for (int i = 0; i < 12; ++i) blocks.push_back(arena->allocate(bytes));
  const std::size_t span = address_of(blocks.back()) + bytes - address_of(blocks.front());
  EXPECT_LE(span, 12 * bytes + 12 * bytes / 20);
}

TEST(Arena, ReturnedNeighboursAreMerged) {
  const TemporaryDirectory directory;
  const auto arena = arena_of(directory, 4 * kMiB);
  for (const std::vector<std::size_t>& order : std::vector<std::vector<std::size_t>>{
           {0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 1, 3}, {1, 3, 0, 2}}) {
    std::vector<std::shared_ptr<void>> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(arena->allocate(kMiB));
    EXPECT_EQ(arena->allocate(1), nullptr);
    for (const std::size_t i : order) blocks[i].reset();
    const auto whole = arena->allocate(4 * kMiB);
    EXPECT_NE(whole, nullptr);
  }
}

TEST(Arena, RefusesWhatDoesNotFit) {
  const TemporaryDirectory directory;
  const auto arena = arena_of(directory, 2 * kMiB);
  EXPECT_EQ(arena->allocate(2 * kMiB + 1), nullptr);
  EXPECT_EQ(arena->allocate(SIZE_MAX), nullptr);
  EXPECT_NE(arena->allocate(2 * kMiB), nullptr);
  EXPECT_EQ(arena_of(directory, 0)->allocate(1), nullptr);
}

TEST(Arena, BlocksOutliveTheTransport) {
  std::vector<std::shared_ptr<void>> blocks(2);
  run_threads(2, small_options(), [&](ShmTransport& transport) {
    auto& block = blocks[static_cast<std::size_t>(transport.rank())];
    block = transport.allocate(100000);
    ASSERT_NE(block, nullptr);
    std::memset(block.get(), transport.rank() + 1, 100000);
    transport.barrier(call_of(Operator::kBarrier));
  });
  for (int rank = 0; rank < 2; ++rank) {
    const auto* bytes = static_cast<unsigned char*>(blocks[static_cast<std::size_t>(rank)].get());
    EXPECT_EQ(bytes[0], rank + 1);
    EXPECT_EQ(bytes[99999], rank + 1);
  }
}

TEST(Arena, TheHeapIsCappedByFreeSpaceAndGivesNullWhenFull) {
  const TemporaryDirectory directory;
  if (mount("tmpfs", directory.path().c_str(), "tmpfs", 0, "size=32m") != 0) {
    GTEST_SKIP() << "mounting a tmpfs needs privileges";
  }
  ShmOptions options;
  options.directory = directory.path();
  run_threads(2, options, [](ShmTransport& transport) {
    // About 9 MiB are staging; each rank can have at most half of the rest.
    std::vector<std::shared_ptr<void>> blocks;
    while (auto block = transport.allocate(kMiB)) {
      std::memset(block.get(), 1, kMiB);
      blocks.push_back(block);
    }
    EXPECT_GE(blocks.size(), 8U);
    EXPECT_LE(blocks.size(), 12U);
    transport.barrier(call_of(Operator::kBarrier));
  });
  umount(directory.path().c_str());
}

}  // namespace
}  // namespace tessera::comm::shm::testing
