// src/comm/shm/arena.h — hands out the part of a segment that belongs to one rank.

#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "comm/shm/segment.h"

namespace tessera::comm::shm {

/// First-fit blocks with neighbours merged on return. The bookkeeping is private to the owner, so a
/// peer that dies or writes wildly cannot corrupt it. Safe to use from several threads.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// Owns `bytes` of `segment` from `offset` on; none of them need to be present yet.
  Arena(std::shared_ptr<Segment> segment, std::size_t offset, std::size_t bytes);

  /// A block at the start of a page, of a huge page if it is many of them; null if no room is left
  /// in the arena or in the file system. The block keeps the arena and the mapping alive.
  std::shared_ptr<void> allocate(std::size_t bytes);

 private:
  void release(std::size_t offset, std::size_t bytes) noexcept;

  std::shared_ptr<Segment> segment_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes
  std::size_t committed_;                    // everything below is present in the file system
};

}  // namespace tessera::comm::shm
