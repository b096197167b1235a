#include "comm/gloo/message_watch.h"

#include <chrono>

#include "comm/start_thread.h"

namespace tessera::comm {
namespace {

constexpr auto kLookInterval = std::chrono::milliseconds(20);

}  // namespace

MessageWatch::~MessageWatch() {
  {
    std::lock_guard lock(mutex_);
    is_stopped_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void MessageWatch::start(const std::string& operation) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = start_thread(operation, [this] { thread_loop(); });
}

void MessageWatch::during(const std::function<bool()>& look, const std::function<void()>& wait) {
  std::list<std::function<bool()>> mine{look};
  const auto place = mine.begin();
  {
    std::lock_guard lock(mutex_);
    if (looks_.empty()) changed_.notify_all();
    looks_.splice(looks_.end(), mine);
  }
  // Taken back under the mutex, so that no look runs after the wait it belongs to.
  const auto take_back = [&] {
    std::lock_guard lock(mutex_);
    mine.splice(mine.end(), looks_, place);
  };
  try {
    wait();
  } catch (...) {
    take_back();
    throw;
  }
  take_back();
}

void MessageWatch::thread_loop() {
  std::unique_lock lock(mutex_);
  while (!is_stopped_) {
    if (looks_.empty()) {
      changed_.wait(lock);
    } else {
      changed_.wait_for(lock, kLookInterval);
      for (const auto& look : looks_) look();
    }
  }
}

}  // namespace tessera::comm
