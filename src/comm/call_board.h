// src/comm/call_board.h — what the ranks of a group are about to do, as they publish it.
//
// In shared memory the headers lie in the segment; engines that send messages lay them side by side
// in memory of their own (`call_table.h`). Both are compared by `call_agreement.h`.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tessera::comm {

/// The call of one rank, as the others see it: one cache line, `arrived` written last.
struct alignas(64) CallHeader {
  std::atomic<std::uint64_t> arrived;  // number of the call within the transport
  std::uint64_t sequence;              // Call::sequence
  std::uint32_t signature;             // operator, dtype, reduce-op and root; see signature_of
  std::uint32_t flags;                 // CallFlag
  std::int64_t count;                  // elements of this rank's own piece
  std::uint64_t offset;                // of this rank's buffer in the segment; 0: private memory
  std::uint64_t digest;                // of the counts, where there is one per peer
  std::byte payload[16];               // a message this small travels with its header
};
static_assert(sizeof(CallHeader) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

enum CallFlag : std::uint32_t {
  kInSlot = 1,    // the message lies in the slot (or in the header) already
  kFarCores = 2,  // rank 0 only: stage past the cache
  kProbe = 4,     // rank 0 only: measure the distance of the cores first
  kUniform = 8,   // all_to_all: every piece in and out has the same count
  kInHeap = 16,   // the pieces for the peers lie in the segment, at PeerCounts::offsets
};

/// Per-peer numbers of one rank's call.
struct PeerCounts {
  std::int64_t* sends;     // elements for each peer
  std::int64_t* receives;  // elements from each peer
  std::int64_t* offsets;   // of the piece for each peer in the segment; 0: private memory

  static PeerCounts at(std::int64_t* first, int size) noexcept {
    return {first, first + size, first + 2 * static_cast<std::ptrdiff_t>(size)};
  }
};

/// The headers and counts of all ranks, each so many bytes behind the one of the rank before.
struct CallBoard {
  int size;
  std::byte* first_header;
  std::size_t header_stride;
  std::byte* first_counts;
  std::size_t counts_stride;

  CallHeader& header(int rank) const noexcept {
    return *reinterpret_cast<CallHeader*>(first_header + rank * header_stride);
  }
  PeerCounts counts(int rank) const noexcept {
    return PeerCounts::at(reinterpret_cast<std::int64_t*>(first_counts + rank * counts_stride),
                          size);
  }
};

}  // namespace tessera::comm
