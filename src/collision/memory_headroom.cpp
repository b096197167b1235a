#include "collision/memory_headroom.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace tessera::collision {
namespace {

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();
// Version 1 writes "no limit" as the largest number of whole pages.
constexpr std::uint64_t kMostLimit = std::uint64_t{1} << 62;

/// A small file, or its beginning. Without the heap: it may be what is full.
class Text {
 public:
  explicit Text(const char* path) noexcept {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    std::size_t size = 0;
    while (size + 1 < sizeof(text_)) {
      const ssize_t got = read(file, text_ + size, sizeof(text_) - 1 - size);
      if (got <= 0) break;
      size += static_cast<std::size_t>(got);
    }
    close(file);
    is_read_ = size > 0;
  }
  explicit operator bool() const noexcept { return is_read_; }
  const char* text() const noexcept { return text_; }
  /// The number of the line that begins with `name`; 0 without one.
  std::uint64_t number_of(const char* name) const noexcept {
    const std::size_t length = std::strlen(name);
    for (const char* line = text_; line != nullptr && *line != '\0'; line = next(line)) {
      if (std::strncmp(line, name, length) != 0) continue;
      return std::strtoull(line + length, nullptr, 10);
    }
    return 0;
  }
  static const char* next(const char* line) noexcept {
    const char* end = std::strchr(line, '\n');
    return end == nullptr ? nullptr : end + 1;
  }

 private:
  char text_[8192] = {};
  bool is_read_ = false;
};

std::uint64_t number_in(const char* folder, const char* name) noexcept {
  char path[4096];
  std::snprintf(path, sizeof(path), "%s/%s", folder, name);
  const Text text(path);
  if (!text || std::strncmp(text.text(), "max", 3) == 0) return kNoLimit;
  return std::strtoull(text.text(), nullptr, 10);
}

std::uint64_t left_of(std::uint64_t limit, std::uint64_t used) noexcept {
  if (limit >= kMostLimit) return kNoLimit;
  const std::uint64_t spare =
      std::clamp<std::uint64_t>(limit / 64, std::uint64_t{16} << 20, std::uint64_t{512} << 20);
  return limit - std::min(limit, used + spare);
}

struct GroupFiles {
  const char* root;
  const char* limit;
  const char* used;
  const char* files[2];  // of memory.stat: pages of files, which are given up when memory is short
};
constexpr GroupFiles kFirst = {"/sys/fs/cgroup/memory",
                               "memory.limit_in_bytes",
                               "memory.usage_in_bytes",
                               {"total_inactive_file ", "total_active_file "}};
constexpr GroupFiles kSecond = {
    "/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file ", "active_file "}};

std::uint64_t left_in(const GroupFiles& names, const char* folder) noexcept {
  const std::uint64_t limit = number_in(folder, names.limit);
  const std::uint64_t used = number_in(folder, names.used);
  if (limit >= kMostLimit || used == kNoLimit) return kNoLimit;
  char path[4096];
  std::snprintf(path, sizeof(path), "%s/memory.stat", folder);
  const Text stat(path);
  const std::uint64_t files = stat.number_of(names.files[0]) + stat.number_of(names.files[1]);
  return left_of(limit, used - std::min(used, files));
}

/// Of the group and all it lies in. In a container the path may be one of the host, which is not
/// there: then what is mounted is the group's own.
std::uint64_t left_in_groups(const GroupFiles& names, const char* path, std::size_t size) noexcept {
  char folder[2048];
  std::snprintf(folder, sizeof(folder), "%s%.*s", names.root, static_cast<int>(size), path);
  const std::size_t root = std::strlen(names.root);
  std::uint64_t left = kNoLimit;
  while (true) {
    left = std::min(left, left_in(names, folder));
    char* last = std::strrchr(folder, '/');
    if (last == nullptr || last < folder + root) return left;
    *last = '\0';
  }
}

std::uint64_t left_in_groups() noexcept {
  const Text groups("/proc/self/cgroup");
  std::uint64_t left = kNoLimit;
  for (const char* line = groups.text(); line != nullptr && *line != '\0';
       line = Text::next(line)) {
    const char* names = std::strchr(line, ':');
    const char* path = names == nullptr ? nullptr : std::strchr(names + 1, ':');
    if (path == nullptr) break;
    const bool is_second = path == names + 1;
    const bool is_first = std::strncmp(names, ":memory:", 8) == 0;
    ++path;
    const std::size_t size = std::strcspn(path, "\n");
    if (is_first) left = std::min(left, left_in_groups(kFirst, path, size));
    if (is_second) {
      left = std::min(left, left_in_groups(kSecond, path, size));
      // Beside groups of the first version.
      constexpr GroupFiles kUnified = {"/sys/fs/cgroup/unified",
                                       kSecond.limit,
                                       kSecond.used,
                                       {"inactive_file ", "active_file "}};
      left = std::min(left, left_in_groups(kUnified, path, size));
    }
  }
  return left;
}

std::uint64_t left_of_machine() noexcept {
  const Text memory("/proc/meminfo");
  const std::uint64_t all = memory.number_of("MemTotal:") * 1024;
  if (all == 0) return kNoLimit;
  const std::uint64_t left =
      (memory.number_of("MemAvailable:") + memory.number_of("SwapFree:")) * 1024;
  return left_of(all, all - std::min(all, left));
}

std::uint64_t left_of_process() noexcept {
  rlimit space{};
  rlimit data{};
  if (getrlimit(RLIMIT_AS, &space) != 0) space.rlim_cur = RLIM_INFINITY;
  if (getrlimit(RLIMIT_DATA, &data) != 0) data.rlim_cur = RLIM_INFINITY;
  if (space.rlim_cur == RLIM_INFINITY && data.rlim_cur == RLIM_INFINITY) return kNoLimit;
  unsigned long long pages[6] = {};
  const Text sizes("/proc/self/statm");
  std::sscanf(sizes.text(), "%llu %llu %llu %llu %llu %llu", &pages[0], &pages[1], &pages[2],
              &pages[3], &pages[4], &pages[5]);
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const auto left = [&](rlim_t limit, std::uint64_t used) {
    return limit == RLIM_INFINITY ? kNoLimit : left_of(limit, used);
  };
  return std::min(left(space.rlim_cur, pages[0] * page), left(data.rlim_cur, pages[5] * page));
}

}  // namespace

std::size_t memory_headroom() noexcept {
  return std::min({left_of_process(), left_of_machine(), left_in_groups()});
}

}  // namespace tessera::collision
