// src/comm/shm/layout.h — what lies where in a group's segment.
//
//   GroupBlock           who we are, and how the group failed
//   RankBlock  x size    call headers, counters and doorbells of one rank
//   counts     x 2 x size   element counts and offsets of the calls that have one per peer
//   slots      x 2 x size   small messages, by parity of the call
//   rings      x size    staging for large messages
//   mailboxes  x size x size   point-to-point messages, one ordered pair each
//   heaps      x size    memory handed out by allocate(); sparse until used
//
// Zero bytes are the valid initial state of everything. One rank writes each word, except in
// GroupBlock, in doorbells and in what the heaps hold.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "comm/call_board.h"
#include "comm/shm/doorbell.h"

namespace tessera::comm::shm {

inline constexpr int kMaxRanks = 64;
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Note [Why the heaps are staggered]
// A reduction in the heap touches the same place of every rank's block in turn. Heaps a power of
// two apart make these addresses equal in all the bits that the L1 cache predicts its way by on
// some CPUs (AMD Zen: bits 12 to 27), and the lines push each other out. An odd number of huge
// pages in between, which costs address space only, keeps them apart.
inline constexpr std::size_t kHeapStagger = 3 * kHugePageBytes;

/// Everything one rank publishes. Counters carry the number of the call in their upper bits (see
/// progress_of), so they only ever grow and need no reset.
struct RankBlock {
  struct alignas(128) Line {
    CallHeader header;
  };
  struct alignas(128) Counter {
    std::atomic<std::uint64_t> value;
  };
  Line calls[2];      // by parity of the call
  Counter staged;     // chunks this rank has put into its ring
  Counter finished;   // chunks this rank has read, or slices it has reduced
  Counter ping;       // distance probe
  Counter verdict;    // rank 0: result of the probe
  Doorbell progress;  // rung when any of the above changes
  Doorbell inbox;     // rung when a mailbox to this rank has news
  Doorbell outbox;    // rung when a mailbox from this rank has room
};

/// How and why the group ended. `state` goes 0 (well), 1 (being written), 2 (readable).
struct FailureRecord {
  static constexpr std::size_t kMaxText = 4000;
  alignas(128) std::atomic<std::uint32_t> state;
  std::uint32_t kind;
  std::uint64_t ranks;  // bit r: rank r is at fault
  std::uint32_t length;
  char text[kMaxText];
};

struct GroupBlock {
  static constexpr std::uint64_t kMagic = 0x7465737365726131;  // "tessera1"
  std::uint64_t magic;
  std::uint64_t size;
  FailureRecord failure;
};

/// Bytes on the way from one rank to another; the data follow the struct. Positions only grow.
struct Mailbox {
  alignas(128) std::atomic<std::uint64_t> written;
  alignas(128) std::atomic<std::uint64_t> read;
};

/// Sizes that a caller may choose; zero means: by the size of the group.
struct Sizes {
  std::size_t slot_bytes = 0;
  std::size_t ring_bytes = 0;
  std::size_t mailbox_bytes = 0;
  std::size_t heap_bytes = 0;  // of one rank; zero means none
};

/// Offsets of the parts. The same on every rank, because rank 0's sizes are sent to all.
class Layout {
 public:
  /// `sizes` without zeros, except for the heap.
  Layout(int size, const Sizes& sizes);

  /// Fills in the sizes left open and rounds all of them. Modest in total: about 9 MB for 2 ranks,
  /// 57 MB for 64, without the heap.
  static Sizes complete(int size, Sizes sizes);

  /// Why `complete` cannot have made these sizes; "" if it can have. For sizes that come from
  /// elsewhere: no offset of a layout of believable sizes overflows.
  static std::string why_not_believable(int size, const Sizes& sizes);

  int size() const noexcept { return size_; }
  const Sizes& sizes() const noexcept { return sizes_; }
  /// Bytes that must be there before the first call: everything but the heaps.
  std::size_t reserved_bytes() const noexcept { return heaps_; }
  std::size_t total_bytes() const noexcept { return total_; }

  std::size_t rank_block(int rank) const noexcept { return ranks_ + rank * sizeof(RankBlock); }
  std::size_t counts(int parity, int rank) const noexcept {
    return counts_ + (parity * size_ + rank) * counts_bytes_;
  }
  std::size_t slot(int parity, int rank) const noexcept {
    return slots_ + (parity * size_ + rank) * sizes_.slot_bytes;
  }
  std::size_t ring(int rank) const noexcept { return rings_ + rank * sizes_.ring_bytes; }
  std::size_t mailbox(int from, int to) const noexcept {
    return mailboxes_ + (from * size_ + to) * (sizeof(Mailbox) + sizes_.mailbox_bytes);
  }
  std::size_t heap(int rank) const noexcept {
    return heaps_ + rank * (sizes_.heap_bytes + kHeapStagger);
  }
  /// Whether the bytes lie in one heap and start at a multiple of `alignment`. For offsets that
  /// another rank wrote.
  bool is_in_a_heap(std::uint64_t offset, std::uint64_t bytes,
                    std::size_t alignment) const noexcept {
    if (offset < heaps_ || offset % alignment != 0) return false;
    const std::size_t stride = sizes_.heap_bytes + kHeapStagger;
    const std::size_t index = (offset - heaps_) / stride;
    const std::size_t inside = (offset - heaps_) % stride;
    return index < static_cast<std::size_t>(size_) && inside <= sizes_.heap_bytes &&
           bytes <= sizes_.heap_bytes - inside;
  }

 private:
  int size_;
  Sizes sizes_;
  std::size_t ranks_ = 0;
  std::size_t counts_bytes_ = 0;
  std::size_t counts_ = 0;
  std::size_t slots_ = 0;
  std::size_t rings_ = 0;
  std::size_t mailboxes_ = 0;
  std::size_t heaps_ = 0;
  std::size_t total_ = 0;
};

/// Typed access to a mapped segment.
class Board {
 public:
  Board(std::byte* base, const Layout& layout) : base_(base), layout_(layout) {}

  const Layout& layout() const noexcept { return layout_; }
  int size() const noexcept { return layout_.size(); }
  std::byte* base() const noexcept { return base_; }

  GroupBlock& group() const noexcept { return at<GroupBlock>(0); }
  RankBlock& rank(int rank) const noexcept { return at<RankBlock>(layout_.rank_block(rank)); }
  CallHeader& header(int rank, int parity) const noexcept {
    return this->rank(rank).calls[parity].header;
  }
  PeerCounts counts(int rank, int parity) const noexcept {
    return PeerCounts::at(&at<std::int64_t>(layout_.counts(parity, rank)), size());
  }
  /// The calls of one parity.
  CallBoard calls(int parity) const noexcept {
    return {size(), reinterpret_cast<std::byte*>(&header(0, parity)), sizeof(RankBlock),
            base_ + layout_.counts(parity, 0),
            layout_.counts(parity, 1) - layout_.counts(parity, 0)};
  }
  std::byte* slot(int rank, int parity) const noexcept {
    return base_ + layout_.slot(parity, rank);
  }
  std::byte* ring(int rank) const noexcept { return base_ + layout_.ring(rank); }
  Mailbox& mailbox(int from, int to) const noexcept {
    return at<Mailbox>(layout_.mailbox(from, to));
  }
  std::byte* mail(int from, int to) const noexcept {
    return base_ + layout_.mailbox(from, to) + sizeof(Mailbox);
  }

  /// Offset of the bytes in the segment, or 0 if they do not lie in a heap of it.
  std::uint64_t offset_of(const void* data, std::size_t bytes) const noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    const auto base = reinterpret_cast<std::uintptr_t>(base_);
    const auto first = base + layout_.reserved_bytes();
    const auto end = base + layout_.total_bytes();
    return address >= first && address <= end && bytes <= end - address ? address - base : 0;
  }

 private:
  template <typename T>
  T& at(std::size_t offset) const noexcept {
    return *reinterpret_cast<T*>(base_ + offset);
  }

  std::byte* base_;
  Layout layout_;
};

/// Number of chunks `chunks` of call number `call` as a counter value.
inline std::uint64_t progress_of(std::uint64_t call, std::int64_t chunks) noexcept {
  return (call << 24) + static_cast<std::uint64_t>(chunks);
}
inline constexpr std::int64_t kMaxChunks = (std::int64_t{1} << 24) - 1;

}  // namespace tessera::comm::shm
