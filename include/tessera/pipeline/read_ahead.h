// tessera/pipeline/read_ahead.h — a source of batches that reads in a thread of its own.
//
//   pipeline::ReadAhead<Batch> ahead([&] { return source.next(); });
//   while (auto output = pipe.progress([&] { return ahead.next(); })) { … }
//
// The batches are those of the source, in its order. What was read ahead and not asked for is lost:
// a position to be saved is that of the batches that `next` gave, not the source's.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "tessera/core/export.h"

namespace tessera::pipeline {

namespace detail {
/// Asks the system to let the threads that compute go first. A wish.
TESSERA_API void be_modest() noexcept;
}  // namespace detail

/// Reads up to `depth` batches before they are asked for. The source is called by one thread, not
/// the caller's, and never after the destructor has returned. Not collective. `next` is for one
/// thread.
template <class Batch>
class ReadAhead {
 public:
  using Source = std::function<std::optional<Batch>()>;

  explicit ReadAhead(Source source, std::size_t depth = 1)
      : source_(std::move(source)), depth_(depth < 1 ? 1 : depth), thread_([this] { read(); }) {}

  /// Waits for the batch that is being read, if there is one.
  ~ReadAhead() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    has_room_.notify_one();
    thread_.join();
  }
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// The next batch of the source; nothing at its end, and ever after. What the source threw is
  /// thrown where its batch would have come, and ever after.
  std::optional<Batch> next() {
    std::unique_lock lock(mutex_);
    has_batch_.wait(lock, [this] { return !batches_.empty() || has_ended_; });
    if (batches_.empty()) {
      if (error_) std::rethrow_exception(error_);
      return std::nullopt;
    }
    std::optional<Batch> batch = std::move(batches_.front());
    batches_.pop_front();
    lock.unlock();
    has_room_.notify_one();
    return batch;
  }

 private:
  void read() {
    detail::be_modest();
    std::unique_lock lock(mutex_);
    for (;;) {
      has_room_.wait(lock, [this] { return is_stopping_ || batches_.size() < depth_; });
      if (is_stopping_) return;
      lock.unlock();
      std::optional<Batch> batch = read_one();
      lock.lock();
      has_ended_ = !batch.has_value();
      if (batch) batches_.push_back(std::move(*batch));
      has_batch_.notify_one();
      if (has_ended_) return;
    }
  }

  // Apart, and without a variable that the source is assigned to: where an assignment throws, GCC
  // 12 keeps the batch of the call before.
  std::optional<Batch> read_one() {
    try {
      return source_();
    } catch (...) {
      error_ = std::current_exception();
    }
    return std::nullopt;
  }

  Source source_;
  std::size_t depth_;
  std::mutex mutex_;
  std::condition_variable has_room_;
  std::condition_variable has_batch_;
  std::deque<Batch> batches_;
  std::exception_ptr error_;  // the thread's until has_ended_
  bool has_ended_ = false;
  bool is_stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace tessera::pipeline
