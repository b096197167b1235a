#include "comm/shm/layout.h"

#include <algorithm>

#include "comm/shm/round_up.h"

namespace tessera::comm::shm {

namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;

std::size_t default_ring_bytes(int size) {
  if (size <= 4) return 4 * kMiB;
  if (size <= 8) return 2 * kMiB;
  if (size <= 32) return kMiB;
  return 512 * kKiB;
}

std::size_t default_mailbox_bytes(int size) {
  if (size <= 2) return 512 * kKiB;
  if (size <= 4) return 256 * kKiB;
  if (size <= 8) return 64 * kKiB;
  if (size <= 16) return 32 * kKiB;
  if (size <= 32) return 8 * kKiB;
  return 4 * kKiB;
}

}  // namespace

Sizes Layout::complete(int size, Sizes sizes) {
  if (sizes.slot_bytes == 0) sizes.slot_bytes = 64 * kKiB;
  if (sizes.ring_bytes == 0) sizes.ring_bytes = default_ring_bytes(size);
  if (sizes.mailbox_bytes == 0) sizes.mailbox_bytes = default_mailbox_bytes(size);
  sizes.slot_bytes = std::max(round_up(sizes.slot_bytes, 128), std::size_t{128});
  // A ring must give every peer at least one line in each of its chunks.
  const std::size_t least_ring = 4 * 128 * static_cast<std::size_t>(size);
  sizes.ring_bytes = std::max(round_up(sizes.ring_bytes, 4 * kKiB), round_up(least_ring, 4 * kKiB));
  sizes.mailbox_bytes = std::max(round_up(sizes.mailbox_bytes, 128), std::size_t{256});
  sizes.heap_bytes = sizes.heap_bytes / kHugePageBytes * kHugePageBytes;
  return sizes;
}

std::string Layout::why_not_believable(int size, const Sizes& sizes) {
  constexpr std::size_t kMost = std::size_t{1} << 40;
  struct Rule {
    const char* name;
    std::size_t bytes;
    std::size_t unit;
    std::size_t least;
  };
  const std::size_t least_ring = round_up(4 * 128 * static_cast<std::size_t>(size), 4 * kKiB);
  for (const Rule& rule : {Rule{"slots", sizes.slot_bytes, 128, 128},
                           Rule{"rings", sizes.ring_bytes, 4 * kKiB, least_ring},
                           Rule{"mailboxes", sizes.mailbox_bytes, 128, 256},
                           Rule{"heaps", sizes.heap_bytes, kHugePageBytes, 0}}) {
    if (rule.bytes >= rule.least && rule.bytes <= kMost && rule.bytes % rule.unit == 0) continue;
    return std::string(rule.name) + " of " + std::to_string(rule.bytes) + " bytes";
  }
  return "";
}

Layout::Layout(int size, const Sizes& sizes) : size_(size), sizes_(sizes) {
  const auto ranks = static_cast<std::size_t>(size);
  std::size_t end = round_up(sizeof(GroupBlock), 4 * kKiB);
  const auto place = [&end](std::size_t bytes, std::size_t alignment) {
    const std::size_t first = round_up(end, alignment);
    end = first + bytes;
    return first;
  };
  ranks_ = place(ranks * sizeof(RankBlock), 128);
  counts_bytes_ = round_up(3 * ranks * sizeof(std::int64_t), 128);
  counts_ = place(2 * ranks * counts_bytes_, 128);
  slots_ = place(2 * ranks * sizes.slot_bytes, 4 * kKiB);
  rings_ = place(ranks * sizes.ring_bytes, 4 * kKiB);
  mailboxes_ = place(ranks * ranks * (sizeof(Mailbox) + sizes.mailbox_bytes), 4 * kKiB);
  heaps_ = place(ranks * (sizes.heap_bytes + kHeapStagger), kHugePageBytes);
  total_ = end;
}

}  // namespace tessera::comm::shm
