#include "comm/shm/arena.h"

#include <iterator>
#include <utility>

#include "comm/shm/layout.h"
#include "comm/shm/round_up.h"

namespace tessera::comm::shm {

namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kAlignedBytes = 32 * kHugePageBytes;

}  // namespace

Arena::Arena(std::shared_ptr<Segment> segment, std::size_t offset, std::size_t bytes)
    : segment_(std::move(segment)), committed_(offset) {
  if (bytes > 0) free_[offset] = bytes;
}

std::shared_ptr<void> Arena::allocate(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  const std::size_t length = bytes == 0 ? kPageBytes : round_up(bytes, kPageBytes);
  // A gap before a block costs memory where the system gives huge pages: a few per cent at most.
  const std::size_t alignment = length >= kAlignedBytes ? kHugePageBytes : kPageBytes;
  const std::lock_guard lock(mutex_);
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    const auto [start, room] = *block;
    const std::size_t first = round_up(start, alignment);
    const std::size_t end = first + length;
    if (end > start + room) continue;
    if (end > committed_) {
      if (!segment_->commit(committed_, end - committed_)) return nullptr;
      committed_ = end;
    }
    free_.erase(block);
    if (first > start) free_[start] = first - start;
    if (start + room > end) free_[end] = start + room - end;
    segment_->populate(first, length);
    return {segment_->base() + first,
            [self = shared_from_this(), first, length](void*) { self->release(first, length); }};
  }
  return nullptr;
}

void Arena::release(std::size_t offset, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

}  // namespace tessera::comm::shm
