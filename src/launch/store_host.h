// launch/store_host.h — the job's key-value store, outside the ranks and only if one asks.
//
// The launcher binds and listens; the first connection makes it start a helper process that takes
// the listening socket over and serves LibTorch's store on it. A program that never connects
// costs nothing, and the death of a rank never takes the store with it.

#pragma once

#include <functional>
#include <string>

#include <sys/types.h>

#include "event_loop.h"
#include "guard.h"
#include "process.h"
#include "socket.h"

namespace tessera::launch {

class StoreHost {
 public:
  /// Listens on `address` (port 0: a free one). `warn` receives one line when the helper cannot be
  /// started or ends early; the job goes on.
  StoreHost(EventLoop& loop, Guard& guard, const SignalState& signals, const SocketAddress& address,
            std::function<void(const std::string&)> warn);
  StoreHost(const StoreHost&) = delete;
  StoreHost& operator=(const StoreHost&) = delete;

  /// Kills the helper and waits for it.
  ~StoreHost();

  const SocketAddress& address() const noexcept { return listener_.address; }
  bool was_used() const noexcept { return was_used_; }
  pid_t helper() const noexcept { return helper_; }

  /// Takes note of a reaped child. Returns whether it was the helper.
  bool on_child_exit(pid_t pid, int status);

 private:
  void start_helper();

  EventLoop& loop_;
  Guard& guard_;
  const SignalState& signals_;
  std::function<void(const std::string&)> warn_;
  Listener listener_;
  FileDescriptor life_line_;  // the helper's stdin; its end tells the helper to end
  pid_t helper_ = -1;
  bool was_used_ = false;
};

/// Returns the path of the `tessera-worker` program: $TESSERA_WORKER, beside the launcher, or in
/// the installed `libexec/tessera`. Empty if there is none.
std::string find_worker_program();

}  // namespace tessera::launch
