#include "collision/reserved_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <string>

namespace tessera::collision {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::size_t kLeast = std::size_t{1} << 24;

std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

}  // namespace

ReservedMemory::ReservedMemory(std::size_t most_bytes) {
  for (std::size_t bytes = whole_pages(most_bytes);; bytes = whole_pages(bytes / 2)) {
    // One page more than wanted, so that it can begin where a huge page may.
    void* got = mmap(nullptr, bytes + kHugePage, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got != MAP_FAILED) {
      const auto start = reinterpret_cast<std::uintptr_t>(got);
      const std::uintptr_t begin = whole_pages(start);
      const std::uintptr_t end = start + bytes + kHugePage;
      if (begin > start) munmap(got, begin - start);
      if (end > begin + bytes) munmap(reinterpret_cast<void*>(begin + bytes), end - begin - bytes);
      data_ = reinterpret_cast<void*>(begin);
      reserved_ = bytes;
      return;
    }
    if (bytes <= kLeast) throw std::bad_alloc();
  }
}

ReservedMemory::~ReservedMemory() { munmap(data_, reserved_); }

bool ReservedMemory::grow(std::size_t bytes) noexcept {
  const std::size_t wanted = whole_pages(bytes);
  if (wanted <= size_) return true;
  if (wanted > reserved_) return false;
  char* behind = static_cast<char*>(data_) + size_;
  if (mprotect(behind, wanted - size_, PROT_READ | PROT_WRITE) != 0) return false;
  madvise(behind, wanted - size_, MADV_HUGEPAGE);  // a wish; ordinary pages do as well
  size_ = wanted;
  return true;
}

void ReservedMemory::clear() noexcept {
  if (size_ == 0) return;
  // A fresh mapping in place of the old one: its pages go back, and it can be grown again.
  mmap(data_, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  size_ = 0;
}

std::int64_t ReservedMemory::huge_page_bytes() const {
  std::ifstream maps("/proc/self/smaps");
  if (!maps) return -1;
  const auto begin = reinterpret_cast<std::uintptr_t>(data_);
  std::int64_t kilobytes = 0;
  bool is_ours = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long low = 0;
    unsigned long long high = 0;
    long long size = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &low, &high) == 2) {
      is_ours = low >= begin && low < begin + reserved_;
    } else if (is_ours && std::sscanf(line.c_str(), "AnonHugePages: %lld", &size) == 1) {
      kilobytes += size;
    }
  }
  return kilobytes * 1024;
}

}  // namespace tessera::collision
