// src/comm/lent_memory.h — memory of this rank that its peers read where it lies.
//
// Note [Who holds lent memory]
// A block begins with the number of peers that still read it, in shared memory. The lender adds its
// readers before it tells them the place; a reader takes itself off when it is done. A block is
// written again when no tensor of the lender holds it and nobody reads it, so neither waits for the
// other: who finds no free block takes a new one.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/transport.h"

namespace tessera::comm {

/// The blocks of one rank of one group. Any thread.
class LentMemory : public std::enable_shared_from_this<LentMemory> {
 public:
  /// Memory to be lent, null if the peers cannot reach any. It is kept when the pointer ends.
  std::shared_ptr<void> take(Transport& transport, std::size_t bytes);

  /// Counts `num_readers` more for the block around `data`, and returns the place of its count, by
  /// which they give it back; 0 if it is no memory of `take`.
  std::uint64_t lend(const Transport& transport, const void* data, std::size_t bytes,
                     int num_readers);
  /// Takes readers off that were never told.
  void take_back(const void* data, std::size_t bytes, int num_readers) noexcept;

  /// `bytes` of a peer's memory at `data`, given back when the pointer ends; `readers` is what
  /// `lend` said. Null if no rank can have lent memory there.
  static std::shared_ptr<void> borrow(Transport& transport, std::uint64_t data, std::size_t bytes,
                                      std::uint64_t readers);

  /// Blocks that are kept, in use or not. For tests.
  std::size_t num_blocks() const;

 private:
  struct alignas(128) Head {
    std::atomic<std::uint32_t> readers;
  };
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

  struct Block {
    std::shared_ptr<void> memory;
    std::size_t bytes = 0;  // without the head
    bool is_held = false;
    Head& head() const { return *static_cast<Head*>(memory.get()); }
    std::byte* data() const { return static_cast<std::byte*>(memory.get()) + sizeof(Head); }
    bool is_free() const { return !is_held && head().readers.load(std::memory_order_acquire) == 0; }
    bool holds(const void* place, std::size_t length) const;
  };

  std::shared_ptr<void> hold(Block& block);
  void leave(const void* data) noexcept;
  Block* block_of(const void* data, std::size_t bytes) noexcept;

  mutable std::mutex mutex_;
  std::vector<Block> blocks_;  // the longest unused first
};

}  // namespace tessera::comm
