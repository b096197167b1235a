// src/serving/errands.h — what takes long, done by a thread of its own.

#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::serving {

/// One errand that may be asked for again and again. Those who ask before it is begun share the
/// next run of it: they want what is there from now on.
class Errands {
 public:
  using Told = std::function<void(bool)>;
  explicit Errands(std::function<bool()> errand) : errand_(std::move(errand)) {}
  Errands(const Errands&) = delete;
  Errands& operator=(const Errands&) = delete;
  ~Errands() { stop(); }

  /// Calls `told` with what the errand returned: later from its thread, or here if the system gives
  /// no thread or all of it has ended.
  void ask(Told told);
  /// Does what was asked for, then ends the thread.
  void stop();

 private:
  void work();

  std::function<bool()> errand_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Told> waiting_;
  bool is_stopping_ = false;
  std::vector<std::thread> threads_;  // at most one
};

}  // namespace tessera::serving
