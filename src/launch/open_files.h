// src/launch/open_files.h — room for the descriptors that a job needs.

#pragma once

#include <sys/resource.h>

#include <algorithm>

namespace tessera::launch {

/// Raises this process's soft limit of open files to `needed`, as far as the hard limit lets it.
/// Processes started afterwards inherit it.
inline void allow_open_files(rlim_t needed) noexcept {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  limit.rlim_cur = std::min(needed, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace tessera::launch
