#include "comm/start_thread.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "core/host_name.h"

namespace tessera::comm {
namespace {

std::optional<std::uint64_t> number_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;  // "max" is no number
}

// The lowest limit of the control groups around this process.
std::optional<std::uint64_t> group_limit() {
  std::optional<std::uint64_t> lowest;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/path", or "9:pids:/path" where every controller has a tree of its own.
    const bool is_unified = line.starts_with("0::/");
    const std::size_t begin = is_unified ? 3 : line.find(":pids:/");
    if (begin == std::string::npos) continue;
    const std::filesystem::path root = is_unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/pids";
    std::filesystem::path inner = line.substr(is_unified ? begin + 1 : begin + 7);
    while (true) {
      const auto limit = number_in(root / inner / "pids.max");
      if (limit) lowest = std::min(*limit, lowest.value_or(*limit));
      if (inner.empty()) break;
      inner = inner.parent_path();
    }
  }
  return lowest;
}

std::size_t num_threads() {
  std::error_code ignored;
  const std::filesystem::directory_iterator threads("/proc/self/task", ignored);
  return static_cast<std::size_t>(std::distance(threads, {}));
}

}  // namespace

Error refused_thread(const std::string& operation, const std::system_error& refusal) {
  // Other ranks are told this too, so it says which process it is about.
  const std::string text = operation + ": process " + std::to_string(::getpid()) + " on host " +
                           core::host_name() +
                           " is given no further thread: " + refusal.code().message() +
                           ". It has " + std::to_string(num_threads());
  std::vector<std::string> limits;
  rlimit of_user{};
  if (::getrlimit(RLIMIT_NPROC, &of_user) == 0 && of_user.rlim_cur != RLIM_INFINITY) {
    limits.push_back(std::to_string(of_user.rlim_cur) + " for all of its user (ulimit -u)");
  }
  if (const auto of_group = group_limit()) {
    limits.push_back(std::to_string(*of_group) + " for all of its control group (pids.max)");
  }
  if (limits.empty()) {
    return {ErrorKind::kUnavailable,
            {},
            text +
                ", and no limit of its own. Start fewer processes on that host, or look at its "
                "memory."};
  }
  return {ErrorKind::kUnavailable,
          {},
          text + ", and the limit is " + limits[0] +
              (limits.size() > 1 ? " and " + limits[1] : std::string()) +
              ". Raise the limit that is reached, or start fewer processes on that host."};
}

}  // namespace tessera::comm
