// src/collision/reserved_memory.h — memory that grows in place.

#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::collision {

/// A range of addresses of which a growing first part is memory, zero at first, in huge pages where
/// the system has them. What lies in it never moves.
class ReservedMemory {
 public:
  /// Reserves up to `most_bytes` of addresses. Where the process may not have so many (RLIMIT_AS),
  /// they are taken as memory is, from a part of its space where nothing else comes to lie.
  explicit ReservedMemory(std::size_t most_bytes);
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;
  ~ReservedMemory();

  /// Makes the first `bytes` usable; false, and nothing has changed, if they cannot be had or leave
  /// too little for others (memory_headroom.h).
  [[nodiscard]] bool grow(std::size_t bytes) noexcept;
  /// Gives the memory back; what is read afterwards, once grown again, is zero.
  void clear() noexcept;

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  std::size_t reserved() const noexcept { return reserved_; }
  /// Bytes in huge pages, -1 if the system does not say.
  std::int64_t huge_page_bytes() const;

 private:
  bool take(std::size_t wanted) noexcept;
  bool make_writable(std::size_t wanted) noexcept;
  void drop(std::size_t from, std::size_t end) noexcept;

  void* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t writable_ = 0;  // at least the size
  std::size_t mapped_ = 0;
  std::size_t reserved_ = 0;
};

}  // namespace tessera::collision
