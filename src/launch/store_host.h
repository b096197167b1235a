// launch/store_host.h — the job's key-value stores, outside the ranks and only if one asks.
//
// There are two. The job's own (comm/store) asks for the job's secret; every rank with our runtime
// uses it. LibTorch's asks for nothing, and is there for programs that know no other. For each the
// launcher binds and listens; the first connection makes it start a helper process that takes the
// listening socket over, with those who wait at it. A program that never connects costs nothing,
// and the death of a rank never takes the store with it.
//
// Anybody may connect to a TCP port. So the launcher looks who it is first (callers.h): LibTorch's
// store is started for users and hosts of the job alone, and what somebody else brings about never
// ends the job.

#pragma once

#include <functional>
#include <string>

#include <sys/types.h>

#include "callers.h"
#include "core/secret.h"
#include "event_loop.h"
#include "guard.h"
#include "process.h"
#include "socket.h"
#include "tessera/launch/launch_error.h"

namespace tessera::launch {

class StoreHost {
 public:
  /// Starts the process that serves on `listening` until its life line, a pipe, is closed. Throws
  /// LaunchError or std::system_error if it cannot.
  using Start = std::function<pid_t(int listening, int life_line)>;

  struct Events {
    /// One line: the store cannot be had, or is killed. The job goes on.
    std::function<void(const std::string&)> warn;
    /// Why one of the job gets no store: ranks would ask for it for many minutes.
    std::function<void(const LaunchError&)> fail;
    /// Whether a caller is of the job. Absent: all are, who get through to the socket.
    std::function<bool(const Caller&)> is_of_job;
    /// Told of everybody who is turned away. Absent: nobody is, since the store knows its own.
    std::function<void(const Caller&)> on_stranger;
  };

  /// Waits for the first connection.
  StoreHost(EventLoop& loop, Guard& guard, FileDescriptor listening, Start start, Events events);
  StoreHost(const StoreHost&) = delete;
  StoreHost& operator=(const StoreHost&) = delete;

  /// Kills the helper and waits for it.
  ~StoreHost();

  bool was_used() const noexcept { return was_used_; }
  pid_t helper() const noexcept { return helper_; }

  /// Takes note of a reaped child. Returns whether it was the helper.
  bool on_child_exit(pid_t pid, int status);

 private:
  void await_callers();
  void pause(std::chrono::nanoseconds delay);
  void on_callers();
  bool is_asked_by_job(const CallerQueue& queue);
  void start_helper();
  void on_no_store(const LaunchError& error);
  void stop_listening();

  EventLoop& loop_;
  Guard& guard_;
  FileDescriptor listening_;
  Start start_;
  Events events_;
  FileDescriptor life_line_;
  /// A program of this host has asked that is of the job: of another host's, nobody knows for sure.
  bool is_for_job_;
  EventLoop::TimerId pause_ = 0;
  pid_t helper_ = -1;
  bool was_used_ = false;
  bool has_warned_ = false;
};

/// The job's own store: a fork of the launcher, ready in a millisecond.
StoreHost::Start job_store(const core::Secret& secret, Guard& guard);

/// LibTorch's store, in `tessera-worker`. `warn` is told that no secret is asked for.
StoreHost::Start torch_store(const std::string& host, const SignalState& signals, Guard& guard,
                             std::function<void(const std::string&)> warn);

/// Returns the path of the `tessera-worker` program: $TESSERA_WORKER, beside the launcher, or in
/// the installed `libexec/tessera`. Empty if there is none.
std::string find_worker_program();

}  // namespace tessera::launch
