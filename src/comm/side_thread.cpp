#include "comm/side_thread.h"

#include <unistd.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "comm/start_thread.h"

namespace tessera::comm {
namespace {

// Shared by a thread and the one it serves, whichever ends first.
struct Lane {
  const pid_t pid = ::getpid();  // threads do not survive a fork
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<std::packaged_task<void()>> job;
  bool is_closed = false;
};

void serve(const std::shared_ptr<Lane>& lane) {
  std::unique_lock lock(lane->mutex);
  while (true) {
    lane->changed.wait(lock, [&] { return lane->job || lane->is_closed; });
    if (!lane->job) return;
    auto job = std::move(*lane->job);
    lane->job.reset();
    lock.unlock();
    job();
    lock.lock();
  }
}

class Owner {
 public:
  Owner() = default;
  ~Owner() { leave(); }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  std::future<void> run(std::function<void()> job) {
    if (!lane_ || lane_->pid != ::getpid()) {
      auto lane = std::make_shared<Lane>();
      start_thread("comm.init", [lane] { serve(lane); }).detach();
      lane_ = std::move(lane);  // now that somebody serves on it
    }
    std::packaged_task<void()> task(std::move(job));
    auto end = task.get_future();
    const std::lock_guard lock(lane_->mutex);
    lane_->job = std::move(task);
    lane_->changed.notify_all();
    return end;
  }

  void leave() {
    if (!lane_ || lane_->pid != ::getpid()) return;
    const std::lock_guard lock(lane_->mutex);
    lane_->is_closed = true;
    lane_->changed.notify_all();
  }

  void abandon() {
    leave();
    lane_.reset();
  }

 private:
  std::shared_ptr<Lane> lane_;
};

thread_local Owner owner;

}  // namespace

std::future<void> run_beside(std::function<void()> job) { return owner.run(std::move(job)); }

void abandon_side_thread() { owner.abandon(); }

}  // namespace tessera::comm
