#include "serving/errands.h"

#include <utility>

#include "core/start_threads.h"

namespace tessera::serving {

void Errands::ask(Told told) {
  {
    const std::lock_guard lock(mutex_);
    // Not before it is needed: whoever forks has none.
    if (threads_.empty() && !is_stopping_) threads_ = core::start_threads(1, [this] { work(); });
    if (!threads_.empty() && !is_stopping_) {
      waiting_.push_back(std::move(told));
      changed_.notify_one();
      return;
    }
  }
  told(errand_());
}

void Errands::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Errands::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_stopping_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const std::vector<Told> told = std::exchange(waiting_, {});
    lock.unlock();
    const bool is_done = errand_();
    for (const Told& one : told) one(is_done);
    lock.lock();
  }
}

}  // namespace tessera::serving
