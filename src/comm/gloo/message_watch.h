// src/comm/gloo/message_watch.h — ends waits for single messages, which Gloo would let wait to its
// limit.

#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>

namespace tessera::comm {

/// Looks after the waits that are announced to it, from a thread of its own.
class MessageWatch {
 public:
  MessageWatch() = default;
  ~MessageWatch();
  MessageWatch(const MessageWatch&) = delete;
  MessageWatch& operator=(const MessageWatch&) = delete;

  /// Starts the thread, unless it runs. Throws an Error of kind unavailable, which begins with
  /// `operation`, if there is none.
  void start(const std::string& operation);
  /// To be called after start. Runs `wait`, and `look` about every 20 ms beside it, until `wait`
  /// returns. `look` must not throw; it ends the wait by other means when it has to, and returns
  /// whether it did.
  void during(const std::function<bool()>& look, const std::function<void()>& wait);

 private:
  void thread_loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::function<bool()>> looks_;
  bool is_stopped_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm
