// launch/event_loop.h — one thread waiting for files, children and moments.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace tessera::launch {

using Clock = std::chrono::steady_clock;

/// Returns nanoseconds since 1970, to be compared between processes and hosts.
inline int64_t wall_clock_ns() {
  using std::chrono::duration_cast;
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return duration_cast<std::chrono::nanoseconds>(since).count();
}

/// Calls back when a file is ready or a moment has come. Single-threaded; a callback may add and
/// remove watches and timers, its own included.
class EventLoop {
 public:
  using TimerId = uint64_t;
  using FileCallback = std::function<void(short events)>;

  /// Watches `fd` for poll(2) `events`; replaces an earlier watch of the same file.
  void watch(int fd, short events, FileCallback callback);
  void unwatch(int fd);

  /// Calls `callback` once, `delay` from now.
  TimerId after(std::chrono::nanoseconds delay, std::function<void()> callback);
  void cancel(TimerId id);

  /// Waits for the next event, at most `limit`, and serves everything that is due.
  void run_once(std::chrono::nanoseconds limit = std::chrono::hours(1));

 private:
  struct Watch {
    short events = 0;
    uint64_t generation = 0;
    FileCallback callback;
  };

  std::map<int, Watch> watches_;
  std::map<std::pair<Clock::time_point, TimerId>, std::function<void()>> timers_;
  std::map<TimerId, Clock::time_point> timer_moments_;
  uint64_t next_id_ = 1;
};

}  // namespace tessera::launch
