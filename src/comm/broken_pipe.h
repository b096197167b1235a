// src/comm/broken_pipe.h — keeps a peer that is gone from ending this process by a signal.

#pragma once

#include <cerrno>
#include <csignal>
#include <ctime>

namespace tessera::comm {

/// While it lives, a write of this thread to a closed connection is an error, not SIGPIPE. Threads
/// started meanwhile inherit this for good. The process's own handling of the signal is left alone.
class BrokenPipeGuard {
 public:
  BrokenPipeGuard() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~BrokenPipeGuard() {
    // One that came meanwhile would be delivered as soon as it may.
    const timespec no_time{};
    while (!was_pending_ && sigtimedwait(&pipe_, nullptr, &no_time) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BrokenPipeGuard(const BrokenPipeGuard&) = delete;
  BrokenPipeGuard& operator=(const BrokenPipeGuard&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
  bool was_pending_;
};

}  // namespace tessera::comm
