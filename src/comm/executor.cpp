#include "comm/executor.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include "comm/short_slice.h"
#include "tessera/comm/error.h"
#include "tessera/core/step_recorder.h"

namespace tessera::comm {
namespace {

// What a step that waits for the operation is said to wait for.
const char* wait_name(c10d::OpType type) {
  switch (type) {
    case c10d::OpType::ALLREDUCE:
    case c10d::OpType::ALLREDUCE_COALESCED:
      return "all_reduce";
    case c10d::OpType::ALLTOALL:
    case c10d::OpType::ALLTOALL_BASE:
      return "all_to_all";
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::_ALLGATHER_BASE:
    case c10d::OpType::ALLGATHER_COALESCED:
      return "all_gather";
    case c10d::OpType::REDUCE_SCATTER:
    case c10d::OpType::_REDUCE_SCATTER_BASE:
      return "reduce_scatter";
    case c10d::OpType::BROADCAST:
      return "broadcast";
    case c10d::OpType::BARRIER:
      return "barrier";
    default:
      return "communication";
  }
}

}  // namespace

EngineWork::EngineWork(std::shared_ptr<Executor> executor, int rank, c10d::OpType type,
                       const char* title, std::uint64_t sequence, std::vector<at::Tensor> outputs,
                       Run run, std::function<bool()> is_met)
    : c10d::Work(rank, type, title),
      executor_(std::move(executor)),
      sequence_(sequence),
      outputs_(std::move(outputs)),
      run_(std::move(run)),
      is_met_(std::move(is_met)) {}

bool EngineWork::isCompleted() {
  std::lock_guard lock(mutex_);
  return completed_;
}

bool EngineWork::is_ready() {
  return isCompleted() || (is_met_ && executor_->is_next(*this, is_met_));
}

bool EngineWork::isSuccess() const {
  std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

bool EngineWork::wait(std::chrono::milliseconds timeout) {
  std::optional<core::Span> span;
  if (!isCompleted()) span.emplace(core::Span::Wait{wait_name(retrieveOpType())});
  if (timeout != kNoTimeout) {
    std::unique_lock lock(mutex_);
    if (!cv_.wait_for(lock, timeout, [this] { return completed_; })) {
      throw Error(ErrorKind::kTimeout, {},
                  "comm.wait #" + std::to_string(sequence_) + ": not done after " +
                      std::to_string(timeout.count()) + " ms.");
    }
  } else {
    executor_->help_until_completed(*this);
  }
  std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> EngineWork::getFuture() {
  std::lock_guard lock(mutex_);
  if (!future_) {
    // A future has to know the GPUs its value lives on.
    std::vector<c10::Device> devices;
    for (const at::Tensor& output : outputs_) {
      if (output.is_cuda() &&
          std::find(devices.begin(), devices.end(), output.device()) == devices.end()) {
        devices.push_back(output.device());
      }
    }
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::move(devices));
    if (completed_) {
      if (exception_) {
        future_->setError(exception_);
      } else {
        future_->markCompleted(c10::IValue(outputs_));
      }
    }
  }
  return future_;
}

void EngineWork::execute() noexcept {
  std::exception_ptr error;
  try {
    run_(*this);
  } catch (...) {
    error = std::current_exception();
  }
  complete(error);
}

void EngineWork::complete(std::exception_ptr error) {
  run_ = nullptr;  // lets go of the tensors it captured
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(mutex_);
    future = future_;
    completed_ = true;
    exception_ = error;
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
  }
  cv_.notify_all();
  // Outside the lock: callbacks may ask this work about itself.
  if (future) {
    if (error) {
      future->setErrorIfNeeded(error);
    } else {
      future->markCompleted(c10::IValue(outputs_));
    }
  }
}

Executor::~Executor() { stop("the group was destroyed"); }

void Executor::end_running(const EngineWork& work) {
  is_running_ = false;
  if (!work.is_announced_) --num_silent_;
  if (!queue_.empty()) thread_wake_.notify_one();
  if (num_helpers_ > 0) helpers_wake_.notify_all();
}

c10::intrusive_ptr<EngineWork> Executor::run_front(std::unique_lock<std::mutex>& lock) {
  auto work = std::move(queue_.front());
  queue_.pop_front();
  is_running_ = true;
  lock.unlock();
  work->execute();
  lock.lock();
  end_running(*work);
  return work;
}

void Executor::run_now(const c10::intrusive_ptr<EngineWork>& work) {
  const core::Span span(core::Span::Wait{wait_name(work->retrieveOpType())});
  std::unique_lock lock(mutex_);
  if (!is_stopped_ && !is_running_ && queue_.empty()) {
    is_running_ = true;
    ++num_silent_;
    lock.unlock();
    work->execute();
    lock.lock();
    end_running(*work);
    return;
  }
  lock.unlock();
  run_later(work);
  help_until_completed(*work);
}

void Executor::run_later(const c10::intrusive_ptr<EngineWork>& work) {
  {
    std::lock_guard lock(mutex_);
    if (!is_stopped_) {
      // Under the lock: announcements go out in the order of the operations.
      if (work->announce_ && num_silent_ == 0) {
        work->announce_();
        work->is_announced_ = true;
      } else {
        ++num_silent_;
      }
      queue_.push_back(work);
      if (!thread_.joinable()) thread_ = std::thread([this] { thread_loop(); });
      thread_wake_.notify_one();
      return;
    }
  }
  work->complete(std::make_exception_ptr(
      Error(ErrorKind::kAborted, {}, "comm: the group is closed. Make a new one.")));
}

void Executor::help_until_completed(EngineWork& work) {
  std::unique_lock lock(mutex_);
  ++num_helpers_;
  while (!work.isCompleted()) {
    if (!is_running_ && !queue_.empty()) {
      auto done = run_front(lock);
      lock.unlock();  // what ends with it may come back here
      done.reset();
      lock.lock();
    } else {
      helpers_wake_.wait(lock);
    }
  }
  --num_helpers_;
}

bool Executor::is_next(const EngineWork& work, const std::function<bool()>& holds) {
  const std::lock_guard lock(mutex_);
  return !is_running_ && !queue_.empty() && queue_.front().get() == &work && holds();
}

void Executor::thread_loop() {
  const std::weak_ptr<Executor> self = weak_from_this();
  std::optional<ShortSliceGuard> short_slices;
  if (is_relay_) short_slices.emplace();
  for (;;) {
    c10::intrusive_ptr<EngineWork> done;
    {
      std::unique_lock lock(mutex_);
      thread_wake_.wait(lock, [&] { return is_stopped_ || (!is_running_ && !queue_.empty()); });
      if (is_stopped_) return;
      done = run_front(lock);
    }
    done.reset();
    if (self.expired()) return;  // nothing of the executor may be touched any more
  }
}

void Executor::stop(const std::string& reason) {
  std::deque<c10::intrusive_ptr<EngineWork>> abandoned;
  std::thread thread;
  {
    std::lock_guard lock(mutex_);
    is_stopped_ = true;
    abandoned.swap(queue_);
    thread.swap(thread_);
    thread_wake_.notify_all();
  }
  for (const auto& work : abandoned) {
    work->complete(std::make_exception_ptr(
        Error(ErrorKind::kAborted, {}, "comm: " + reason + " with operations still queued.")));
  }
  {
    std::lock_guard lock(mutex_);
    helpers_wake_.notify_all();
  }
  if (thread.joinable()) {
    // The last reference to a group may go away inside one of its own callbacks.
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

}  // namespace tessera::comm
