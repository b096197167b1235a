#include "core/kept_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <mutex>

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

namespace tessera::core {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

class KeptMemory;

struct Block {
  void* data;
  std::size_t bytes;  // a multiple of kHugePage
  KeptMemory* owner;
};

void* map(std::size_t bytes) {
  // One huge page more than needed, cut off again so that the block begins at one.
  const std::size_t room = bytes + kHugePage;
  void* mapped = ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, mapped != MAP_FAILED, "core: there is no memory for ", bytes,
                   " bytes of a result.");
  auto* first = static_cast<std::byte*>(mapped);
  const std::size_t skipped =
      (kHugePage - reinterpret_cast<std::uintptr_t>(first) % kHugePage) % kHugePage;
  if (skipped != 0) ::munmap(first, skipped);
  ::munmap(first + skipped + bytes, kHugePage - skipped);
  ::madvise(first + skipped, bytes, MADV_HUGEPAGE);
  return first + skipped;
}

class KeptMemory final : public c10::Allocator {
 public:
  // Never destroyed: tensors may end after everything else.
  static KeptMemory& many() {
    static auto* only = new KeptMemory(/*is_for_one=*/false);
    return *only;
  }
  static KeptMemory& last() {
    static auto* only = new KeptMemory(/*is_for_one=*/true);
    return *only;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    auto* block =
        new Block(take(std::max<std::size_t>(1, (bytes + kHugePage - 1) / kHugePage) * kHugePage));
    return {block->data, block, &leave, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  std::size_t free_bytes() {
    const std::scoped_lock lock(mutex_);
    return free_bytes_;
  }

 private:
  explicit KeptMemory(bool is_for_one) : is_for_one_(is_for_one) {}

  Block take(std::size_t bytes) {
    std::deque<Block> dropped;
    {
      const std::scoped_lock lock(mutex_);
      // The smallest that fits, and is not much too large.
      auto best = free_.end();
      for (auto block = free_.begin(); block != free_.end(); ++block) {
        const bool fits = block->bytes >= bytes && block->bytes <= bytes + bytes / 2;
        if (fits && (best == free_.end() || block->bytes < best->bytes)) best = block;
      }
      if (best != free_.end()) {
        const Block found = *best;
        free_.erase(best);
        free_bytes_ -= found.bytes;
        return found;
      }
      if (is_for_one_) {
        dropped.swap(free_);
        free_bytes_ = 0;
      }
    }
    unmap(dropped);
    return {map(bytes), bytes, this};
  }

  static void leave(void* context) {
    auto* block = static_cast<Block*>(context);
    block->owner->keep(*block);
    delete block;
  }

  void keep(Block block) {
    std::deque<Block> dropped;
    {
      const std::scoped_lock lock(mutex_);
      free_.push_back(block);
      free_bytes_ += block.bytes;
      while (is_for_one_ ? free_.size() > 1 : free_bytes_ > kMostKeptBytes) {
        dropped.push_back(free_.front());
        free_bytes_ -= free_.front().bytes;
        free_.pop_front();
      }
    }
    unmap(dropped);
  }

  static void unmap(const std::deque<Block>& blocks) {
    for (const Block& each : blocks) ::munmap(each.data, each.bytes);
  }

  const bool is_for_one_;
  std::mutex mutex_;
  std::deque<Block> free_;  // in the order in which they were left
  std::size_t free_bytes_ = 0;
};

std::size_t bytes_of(at::IntArrayRef shape, const at::TensorOptions& options) {
  std::size_t bytes = options.dtype().itemsize();
  for (const std::int64_t size : shape) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

at::Tensor empty_from(KeptMemory& memory, std::size_t least_bytes, at::IntArrayRef shape,
                      const at::TensorOptions& options) {
  if (!options.device().is_cpu() || options.pinned_memory() ||
      bytes_of(shape, options) < least_bytes) {
    return at::empty(shape, options.requires_grad(false));
  }
  return at::detail::empty_generic(shape, &memory, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

}  // namespace

at::Tensor empty_kept(at::IntArrayRef shape, const at::TensorOptions& options) {
  return empty_from(KeptMemory::many(), kLeastKeptBytes, shape, options);
}

at::Tensor empty_kept_last(at::IntArrayRef shape, const at::TensorOptions& options) {
  if (bytes_of(shape, options) < kLeastLastBytes) return empty_kept(shape, options);
  return empty_from(KeptMemory::last(), kLeastLastBytes, shape, options);
}

std::size_t kept_bytes() noexcept {
  return KeptMemory::many().free_bytes() + KeptMemory::last().free_bytes();
}

}  // namespace tessera::core
