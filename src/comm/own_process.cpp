#include "comm/own_process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace tessera::comm {

pid_t own_pid() noexcept {
  static std::atomic<pid_t> pid{0};
  [[maybe_unused]] static const int installed =
      (pid = ::getpid(), ::pthread_atfork(nullptr, nullptr, [] { pid = ::getpid(); }));
  return pid.load(std::memory_order_relaxed);
}

}  // namespace tessera::comm
