// src/collision/reserved_memory.h — memory that grows in place.

#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::collision {

/// A range of addresses of which a growing first part is memory, zero at first, in huge pages where
/// the system has them. What lies in it never moves.
class ReservedMemory {
 public:
  /// Reserves up to `most_bytes` of addresses: less where the process may not have so many.
  explicit ReservedMemory(std::size_t most_bytes);
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;
  ~ReservedMemory();

  /// Makes the first `bytes` usable; false if they cannot be had.
  [[nodiscard]] bool grow(std::size_t bytes) noexcept;
  /// Gives the memory back; what is read afterwards, once grown again, is zero.
  void clear() noexcept;

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  std::size_t reserved() const noexcept { return reserved_; }
  /// Bytes in huge pages, -1 if the system does not say.
  std::int64_t huge_page_bytes() const;

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t reserved_ = 0;
};

}  // namespace tessera::collision
