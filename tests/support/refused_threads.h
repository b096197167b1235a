// tests/support/refused_threads.h — threads that the system refuses, one at a time.
//
// For programs with refused_threads.cpp among their sources: there it stands before the C library,
// so the threads of the libraries are counted too.

#pragma once

#include <cstdint>

namespace tessera::testing {

/// While it lives, the n-th thread started from now on is refused, as where there are as many as
/// there may be: by the whole process, or, if `of_this_thread`, by the one that made it. One at a
/// time.
class RefusedThread {
 public:
  explicit RefusedThread(std::int64_t n, bool of_this_thread = false);
  ~RefusedThread();
  RefusedThread(const RefusedThread&) = delete;
  RefusedThread& operator=(const RefusedThread&) = delete;

  /// Whether it was refused, or not so many were started.
  bool was_refused() const;
};

}  // namespace tessera::testing
