#include "comm/executor.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include "comm/short_slice.h"
#include "comm/start_thread.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"
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

// As errors name the operation.
std::string operation_name(c10d::OpType type) {
  switch (type) {
    case c10d::OpType::SEND:
      return "comm.send";
    case c10d::OpType::RECV:
    case c10d::OpType::RECVANYSOURCE:
      return "comm.recv";
    case c10d::OpType::REDUCE:
      return "comm.reduce";
    case c10d::OpType::GATHER:
      return "comm.gather";
    case c10d::OpType::SCATTER:
      return "comm.scatter";
    default:
      return std::string("comm.") + wait_name(type);
  }
}

}  // namespace

EngineWork::EngineWork(std::shared_ptr<Executor> executor, int rank, c10d::OpType type,
                       const char* title, std::uint64_t sequence, std::vector<at::Tensor> outputs,
                       Run run, std::function<bool()> is_met,
                       const std::optional<std::vector<at::Tensor>>& inputs)
    : c10d::Work(rank, type, title, inputs),
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
                  "comm.wait #" + std::to_string(sequence_) + ": Timed out: not done after " +
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
  is_quiet_ = false;
  return future_locked();
}

c10::intrusive_ptr<c10::ivalue::Future> EngineWork::quiet_future() {
  std::lock_guard lock(mutex_);
  return future_locked();
}

c10::intrusive_ptr<c10::ivalue::Future> quiet_future(c10d::Work& work) {
  auto* engine_work = dynamic_cast<EngineWork*>(&work);
  return engine_work != nullptr ? engine_work->quiet_future() : work.getFuture();
}

bool EngineWork::may_call_back() const {
  std::lock_guard lock(mutex_);
  return !is_quiet_;
}

c10::intrusive_ptr<c10::ivalue::Future> EngineWork::future_locked() {
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
  complete(error, true);
}

void EngineWork::complete(std::exception_ptr error, bool has_run) {
  run_ = nullptr;  // lets go of the tensors it captured
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool is_quiet = true;
  {
    std::lock_guard lock(mutex_);
    future = future_;
    is_quiet = is_quiet_;
    completed_ = true;
    exception_ = error;
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
  }
  cv_.notify_all();
  if (!future) return;
  // Outside the lock: callbacks may ask this work about itself.
  if (has_run) executor_->begin_callbacks(is_quiet);
  if (error) {
    future->setErrorIfNeeded(error);
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
  if (has_run) executor_->end_callbacks();
}

Executor::~Executor() { stop("the group was destroyed"); }

void Executor::begin_running(EngineWork& work) {
  is_running_ = true;
  running_ = &work;
  if (work.is_announced_) return;  // numbered then
  work.position_ = next_position_;
  next_position_ += work.num_steps_;
}

void Executor::end_running(const EngineWork& work) {
  is_running_ = false;
  running_ = nullptr;
  if (!work.is_announced_) --num_silent_;
  if (!queue_.empty()) thread_wake_.notify_one();
  if (num_helpers_ > 0) helpers_wake_.notify_all();
}

c10::intrusive_ptr<EngineWork> Executor::run_front(std::unique_lock<std::mutex>& lock) {
  auto work = take_front();
  begin_running(*work);
  lock.unlock();
  work->execute();
  lock.lock();
  end_running(*work);
  return work;
}

c10::intrusive_ptr<EngineWork> Executor::take_front() {
  auto work = std::move(queue_.front());
  queue_.pop_front();
  return work;
}

void Executor::begin_callbacks(bool are_quiet) {
  std::lock_guard lock(mutex_);
  callback_thread_ = std::this_thread::get_id();
  callbacks_since_ = Clock::now();
  if (num_helpers_ > 0) helpers_wake_.notify_all();  // what they wait for may be this operation
  if (!are_quiet && !queue_.empty()) start_watch();
}

void Executor::end_callbacks() {
  std::lock_guard lock(mutex_);
  callback_thread_ = {};
}

void Executor::run_nested(std::unique_lock<std::mutex>& lock, EngineWork& work) {
  EngineWork* const outer = running_;
  callback_thread_ = {};
  begin_running(work);
  lock.unlock();
  work.execute();
  lock.lock();
  if (!work.is_announced_) --num_silent_;
  running_ = outer;
  callback_thread_ = std::this_thread::get_id();
  callbacks_since_ = Clock::now();
  if (num_helpers_ > 0) helpers_wake_.notify_all();
  if (!queue_.empty()) start_watch();
}

void Executor::run_front_nested(std::unique_lock<std::mutex>& lock) {
  auto front = take_front();
  run_nested(lock, *front);
  lock.unlock();  // what ends with it may come back here
  front.reset();
  lock.lock();
}

bool Executor::run_in_callback(EngineWork& work) {
  std::unique_lock lock(mutex_);
  if (is_stopped_ || !options_.is_ordered || !is_in_callback()) return false;
  // What the peers were promised comes first.
  while (!queue_.empty() && queue_.front()->is_announced_) run_front_nested(lock);
  ++num_silent_;
  run_nested(lock, work);
  return true;
}

void Executor::run_now(const c10::intrusive_ptr<EngineWork>& work) {
  const core::Span span(core::Span::Wait{wait_name(work->retrieveOpType())});
  std::unique_lock lock(mutex_);
  if (!is_stopped_ && !is_running_ && queue_.empty()) {
    ++num_silent_;
    begin_running(*work);
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

bool Executor::may_announce() const {
  // Callbacks of those before it may start something that comes first.
  return num_silent_ == 0 && (running_ == nullptr || !running_->may_call_back()) &&
         std::none_of(queue_.begin(), queue_.end(),
                      [](const auto& queued) { return queued->may_call_back(); });
}

void Executor::start_thread_for(const EngineWork& work, std::unique_lock<std::mutex>& lock) {
  if (thread_.joinable()) return;
  try {
    thread_ = start_thread(operation_name(work.retrieveOpType()), [this] { thread_loop(); });
  } catch (const Error& refused) {
    lock.unlock();
    // The peers would wait for the operation.
    if (options_.on_given_up) options_.on_given_up(refused.kind(), refused.what());
    throw;
  }
}

void Executor::run_later(const c10::intrusive_ptr<EngineWork>& work) {
  if (run_in_callback(*work)) return;
  {
    std::unique_lock lock(mutex_);
    if (!is_stopped_) {
      start_thread_for(*work, lock);
      // Under the lock: announcements go out in the order of the operations.
      if (work->announce_ && may_announce()) {
        work->position_ = next_position_;
        next_position_ += work->num_steps_;
        work->announce_();
        work->is_announced_ = true;
      } else {
        ++num_silent_;
      }
      work->queued_at_ = Clock::now();
      queue_.push_back(work);
      thread_wake_.notify_one();
      if (callback_thread_ != std::thread::id{} && running_->may_call_back()) start_watch();
      return;
    }
  }
  work->complete(std::make_exception_ptr(
      Error(ErrorKind::kAborted, {}, "comm: the group is closed. Make a new one.")));
}

void Executor::help_until_completed(EngineWork& work) {
  // In a forked child nobody runs the queue, and a child must not.
  TESSERA_CHECK_VALUE(maker_ == own_pid(), "comm.wait: the operation belongs to process ", maker_,
                      "; this is process ", own_pid(), ", forked from it. Wait for it in process ",
                      maker_, ", before the fork.");
  std::unique_lock lock(mutex_);
  ++num_helpers_;
  while (!work.isCompleted()) {
    if (is_in_callback() && !queue_.empty()) {
      run_front_nested(lock);
    } else if (!is_running_ && !queue_.empty()) {
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
  if (options_.is_relay) short_slices.emplace();
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

void Executor::start_watch() noexcept {
  if (watch_.joinable() || is_stopped_) return;
  try {
    watch_ = std::thread([this] { watch_loop(); });
  } catch (const std::exception&) {
    // Operations and their callbacks go on as they would.
  }
}

std::vector<c10::intrusive_ptr<EngineWork>> Executor::take_overdue() {
  std::vector<c10::intrusive_ptr<EngineWork>> overdue;
  if (callback_thread_ == std::thread::id{}) return overdue;
  const auto now = Clock::now();
  const auto is_overdue = [&](const c10::intrusive_ptr<EngineWork>& work) {
    return work->limit_.count() > 0 &&
           now - std::max(work->queued_at_, callbacks_since_) >= work->limit_;
  };
  const auto first = std::find_if(queue_.begin(), queue_.end(), is_overdue);
  // With one of them those behind it are lost: the peers wait for them in this order.
  overdue.assign(first, queue_.end());
  queue_.erase(first, queue_.end());
  for (const auto& work : overdue) {
    if (!work->is_announced_) --num_silent_;
  }
  return overdue;
}

void Executor::watch_loop() {
  constexpr auto kLookEvery = std::chrono::milliseconds(100);
  const std::weak_ptr<Executor> self = weak_from_this();
  for (;;) {
    std::vector<c10::intrusive_ptr<EngineWork>> overdue;
    std::string holder;
    {
      std::unique_lock lock(mutex_);
      watch_wake_.wait_for(lock, kLookEvery, [this] { return is_stopped_; });
      if (is_stopped_) return;
      overdue = take_overdue();
      if (overdue.empty()) continue;
      if (running_ != nullptr) holder = std::string(wait_name(running_->retrieveOpType()));
    }
    const std::string text =
        "comm." + std::string(wait_name(overdue[0]->retrieveOpType())) + " #" +
        std::to_string(overdue[0]->sequence_) + ": Timed out after " +
        std::to_string(overdue[0]->limit_.count()) + " ms behind a callback of " + holder +
        " that does not return. Wait in a callback only for operations that it started itself, or "
        "raise the time limit.";
    if (options_.on_given_up) options_.on_given_up(ErrorKind::kTimeout, text);
    for (const auto& work : overdue) {
      work->complete(std::make_exception_ptr(Error(ErrorKind::kTimeout, {}, text)));
    }
    {
      std::lock_guard lock(mutex_);
      helpers_wake_.notify_all();
    }
    overdue.clear();
    if (self.expired()) return;  // nothing of the executor may be touched any more
  }
}

void Executor::stop(const std::string& reason) {
  std::deque<c10::intrusive_ptr<EngineWork>> abandoned;
  std::thread thread;
  std::thread watch;
  {
    std::lock_guard lock(mutex_);
    is_stopped_ = true;
    abandoned.swap(queue_);
    thread.swap(thread_);
    watch.swap(watch_);
    thread_wake_.notify_all();
    watch_wake_.notify_all();
  }
  for (const auto& work : abandoned) {
    work->complete(std::make_exception_ptr(
        Error(ErrorKind::kAborted, {}, "comm: " + reason + " with operations still queued.")));
  }
  {
    std::lock_guard lock(mutex_);
    helpers_wake_.notify_all();
  }
  for (std::thread* one : {&thread, &watch}) {
    if (!one->joinable()) continue;
    // The last reference to a group may go away inside one of its own callbacks.
    if (one->get_id() == std::this_thread::get_id()) {
      one->detach();
    } else {
      one->join();
    }
  }
}

}  // namespace tessera::comm
