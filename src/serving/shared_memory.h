// src/serving/shared_memory.h — memory without a name that processes of one family share.
//
// A memfd whose size is sealed. A process that is forked has it at the same address, so what lies
// in it may point into it. Pages that nobody has touched cost nothing.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera::serving {

/// Bytes rounded up to whole pages.
std::size_t whole_pages(std::size_t num_bytes);

class SharedMemory {
 public:
  SharedMemory() = default;
  /// Throws checkpoint::Error(kRead) with the system's reason.
  SharedMemory(const char* name, std::size_t num_bytes);
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  /// Shows bytes [begin, begin + num_bytes) at `address`, in place of what is there.
  void show_at(void* address, std::size_t begin, std::size_t num_bytes) const;
  /// All of it, at an address of the system's choice, until this goes.
  std::byte* data() const noexcept { return data_; }
  std::size_t num_bytes() const noexcept { return num_bytes_; }
  /// For this process, from now on.
  void make_read_only() const noexcept;

 private:
  int fd_ = -1;
  std::byte* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

}  // namespace tessera::serving
