// launch/event_loop.h — one thread waiting for files, children and moments.

#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
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
/// remove watches and timers, its own included. What it knows of time, and how it waits, a
/// simulator replaces.
class EventLoop {
 public:
  using TimerId = uint64_t;
  using FileCallback = std::function<void(short events)>;

  EventLoop() = default;
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;
  virtual ~EventLoop() = default;

  /// The time that timers go by.
  virtual Clock::time_point now() const { return Clock::now(); }
  /// The time that is told to other hosts: see wall_clock_ns.
  virtual int64_t wall_ns() const { return wall_clock_ns(); }

  /// Watches `fd` for poll(2) `events`; replaces an earlier watch of the same file.
  void watch(int fd, short events, FileCallback callback);
  void unwatch(int fd);

  /// Calls `callback` once, `delay` from now.
  TimerId after(std::chrono::nanoseconds delay, std::function<void()> callback);
  void cancel(TimerId id);

  /// Waits for the next event, at most `limit`, and serves everything that is due.
  void run_once(std::chrono::nanoseconds limit = std::chrono::hours(1));

  /// When the next timer is due.
  std::optional<Clock::time_point> next_moment() const;

 protected:
  /// As ppoll(2).
  virtual int wait_for_files(std::vector<pollfd>& files, std::chrono::nanoseconds limit);

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
