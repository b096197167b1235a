#include "collision/reserved_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <mutex>
#include <new>
#include <string>

#include "collision/memory_headroom.h"

namespace tessera::collision {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::size_t kLeast = std::size_t{1} << 24;

std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

// Where addresses are counted, none are reserved: memory is mapped behind what is there, so far
// from everything else that nobody comes in between.
constexpr std::uintptr_t kFirstAddress = std::uintptr_t{1} << 44;
constexpr std::uintptr_t kEndAddress = 5 * kFirstAddress;
constexpr std::size_t kGap = std::size_t{1} << 30;

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

/// Maps exactly there, or not at all.
bool map_at(std::uintptr_t place, std::size_t bytes) noexcept {
  void* const wanted = reinterpret_cast<void*>(place);
  void* const got = mmap(wanted, bytes, PROT_NONE, kReserved | MAP_FIXED_NOREPLACE, -1, 0);
  if (got == MAP_FAILED) return false;
  if (got == wanted) return true;
  munmap(got, bytes);  // an old kernel took it for a wish
  return false;
}

/// The first page of `bytes` free addresses; 0: none found.
std::uintptr_t map_far_off(std::size_t bytes) noexcept {
  static std::atomic<std::uintptr_t> next = kFirstAddress;
  constexpr int kTries = 1024;
  for (int i = 0; i < kTries; ++i) {
    const std::uintptr_t place = next.fetch_add(bytes + kGap);
    if (place < kFirstAddress || place + bytes + kGap > kEndAddress) {
      next = kFirstAddress;
      continue;
    }
    if (map_at(place, kHugePage)) return place;
  }
  return 0;
}

/// What all tables take at this moment. They may grow at once, and each is to see what the others
/// take.
struct Taking {
  std::mutex mutex;
  std::condition_variable is_done;
  std::size_t bytes = 0;
};
Taking& taking() {
  static auto& all = *new Taking;  // as long as any table
  return all;
}

bool begin_taking(std::size_t bytes) noexcept {
  Taking& all = taking();
  std::unique_lock lock(all.mutex);
  // Of what others are taking, some may be gone from the headroom already. If that decides, they
  // are waited for.
  while (all.bytes + bytes > memory_headroom()) {
    if (all.bytes == 0) return false;
    all.is_done.wait(lock);
  }
  all.bytes += bytes;
  return true;
}

void end_taking(std::size_t bytes) noexcept {
  Taking& all = taking();
  {
    const std::scoped_lock lock(all.mutex);
    all.bytes -= bytes;
  }
  all.is_done.notify_all();
}

}  // namespace

ReservedMemory::ReservedMemory(std::size_t most_bytes) {
  rlimit addresses{};
  if (getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY) {
    most_bytes = std::min<std::size_t>(most_bytes, addresses.rlim_cur);
    if (const std::uintptr_t place = map_far_off(whole_pages(most_bytes))) {
      data_ = reinterpret_cast<void*>(place);
      reserved_ = whole_pages(most_bytes);
      mapped_ = kHugePage;
      return;
    }
    most_bytes /= 64;
  }
  for (std::size_t bytes = whole_pages(most_bytes);; bytes = whole_pages(bytes / 2)) {
    // One page more than wanted, so that it can begin where a huge page may.
    void* got = mmap(nullptr, bytes + kHugePage, PROT_NONE, kReserved, -1, 0);
    if (got != MAP_FAILED) {
      const auto start = reinterpret_cast<std::uintptr_t>(got);
      const std::uintptr_t begin = whole_pages(start);
      const std::uintptr_t end = start + bytes + kHugePage;
      if (begin > start) munmap(got, begin - start);
      if (end > begin + bytes) munmap(reinterpret_cast<void*>(begin + bytes), end - begin - bytes);
      data_ = reinterpret_cast<void*>(begin);
      reserved_ = mapped_ = bytes;
      return;
    }
    if (bytes <= kLeast) throw std::bad_alloc();
  }
}

ReservedMemory::~ReservedMemory() { munmap(data_, mapped_); }

bool ReservedMemory::grow(std::size_t bytes) noexcept {
  const std::size_t wanted = whole_pages(bytes);
  if (wanted <= size_) return true;
  const std::size_t more = wanted - size_;
  if (wanted > reserved_ || !begin_taking(more)) return false;
  const bool is_taken = take(wanted);
  end_taking(more);
  if (is_taken) size_ = wanted;
  return is_taken;
}

bool ReservedMemory::take(std::size_t wanted) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(data_);
  if (wanted > mapped_) {
    if (!map_at(begin + mapped_, wanted - mapped_)) return false;
    mapped_ = wanted;
  }
  if (!make_writable(wanted)) return false;
  // Pages are taken now, so that the next to ask for memory hears of it; but tables that are small,
  // of which there may be many, have the pages they use. Kernels before 5.14 do not know how.
  const std::size_t first = std::max(size_, kHugePage);
  if (wanted > first &&
      madvise(static_cast<char*>(data_) + first, wanted - first, MADV_POPULATE_WRITE) != 0 &&
      errno != EINVAL) {
    drop(size_, wanted);
    writable_ = size_;
    return false;
  }
  return true;
}

// As long a piece again as there is: the system changes pieces of memory one after the other, and
// between the pages that other tables take. Where writable memory is counted, no more than wanted.
bool ReservedMemory::make_writable(std::size_t wanted) noexcept {
  if (wanted <= writable_) return true;
  rlimit data{};
  const bool is_counted =
      mapped_ != reserved_ || getrlimit(RLIMIT_DATA, &data) != 0 || data.rlim_cur != RLIM_INFINITY;
  char* const behind = static_cast<char*>(data_) + writable_;
  for (const std::size_t end : {is_counted ? wanted : std::min(2 * wanted, reserved_), wanted}) {
    if (mprotect(behind, end - writable_, PROT_READ | PROT_WRITE) != 0) continue;
    madvise(behind, end - writable_, MADV_HUGEPAGE);  // a wish; ordinary pages do as well
    writable_ = end;
    return true;
  }
  return false;
}

void ReservedMemory::drop(std::size_t from, std::size_t end) noexcept {
  // A fresh mapping in place of the old one: its pages go back, and it can be grown again.
  mmap(static_cast<char*>(data_) + from, end - from, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
}

void ReservedMemory::clear() noexcept {
  if (size_ == 0) return;
  drop(0, writable_);
  size_ = writable_ = 0;
  if (mapped_ == reserved_) return;
  munmap(static_cast<char*>(data_) + kHugePage, mapped_ - kHugePage);
  mapped_ = kHugePage;
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
