#include "comm/lent_memory.h"

#include <algorithm>
#include <new>
#include <utility>

namespace tessera::comm {
namespace {

// Free blocks beyond these go back to the transport: sizes change from batch to batch.
constexpr std::ptrdiff_t kMostFree = 4;

}  // namespace

bool LentMemory::Block::holds(const void* place, std::size_t length) const {
  const auto first = reinterpret_cast<std::uintptr_t>(data());
  const auto address = reinterpret_cast<std::uintptr_t>(place);
  return address >= first && address <= first + bytes && length <= first + bytes - address;
}

std::shared_ptr<void> LentMemory::hold(Block& block) {
  block.is_held = true;
  return {block.data(), [self = shared_from_this()](void* data) { self->leave(data); }};
}

std::shared_ptr<void> LentMemory::take(Transport& transport, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  auto best = blocks_.end();
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    // Large enough, and not much too large.
    const bool fits = block->bytes >= bytes && block->bytes <= bytes + bytes / 2;
    if (fits && block->is_free() && (best == blocks_.end() || block->bytes < best->bytes)) {
      best = block;
    }
  }
  if (best != blocks_.end()) return hold(*best);
  const auto is_free = [](const Block& block) { return block.is_free(); };
  if (std::count_if(blocks_.begin(), blocks_.end(), is_free) >= kMostFree) {
    blocks_.erase(std::find_if(blocks_.begin(), blocks_.end(), is_free));
  }
  Block block{transport.allocate(sizeof(Head) + bytes), bytes, false};
  if (!block.memory || transport.place_of(block.memory.get(), sizeof(Head) + bytes) == 0) {
    return nullptr;
  }
  new (block.memory.get()) Head{};
  return hold(blocks_.emplace_back(std::move(block)));
}

void LentMemory::leave(const void* data) noexcept {
  const std::lock_guard lock(mutex_);
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    if (block->data() != data) continue;
    block->is_held = false;
    std::rotate(block, block + 1, blocks_.end());
    return;
  }
}

LentMemory::Block* LentMemory::block_of(const void* data, std::size_t bytes) noexcept {
  for (Block& block : blocks_) {
    if (block.is_held && block.holds(data, bytes)) return &block;
  }
  return nullptr;
}

std::uint64_t LentMemory::lend(const Transport& transport, const void* data, std::size_t bytes,
                               int num_readers) {
  const std::lock_guard lock(mutex_);
  Block* block = block_of(data, bytes);
  if (block == nullptr) return 0;
  block->head().readers.fetch_add(static_cast<std::uint32_t>(num_readers),
                                  std::memory_order_relaxed);
  return transport.place_of(&block->head(), sizeof(Head));
}

void LentMemory::take_back(const void* data, std::size_t bytes, int num_readers) noexcept {
  const std::lock_guard lock(mutex_);
  if (Block* block = block_of(data, bytes)) {
    block->head().readers.fetch_sub(static_cast<std::uint32_t>(num_readers),
                                    std::memory_order_release);
  }
}

std::shared_ptr<void> LentMemory::borrow(Transport& transport, std::uint64_t data,
                                         std::size_t bytes, std::uint64_t readers) {
  auto head =
      std::static_pointer_cast<Head>(transport.at_place(readers, sizeof(Head), alignof(Head)));
  void* place = transport.at_place(data, bytes, 1).get();
  if (head == nullptr || place == nullptr) return nullptr;
  return {place, [head = std::move(head)](void*) {
            head->readers.fetch_sub(1, std::memory_order_release);
          }};
}

std::size_t LentMemory::num_blocks() const {
  const std::lock_guard lock(mutex_);
  return blocks_.size();
}

}  // namespace tessera::comm
