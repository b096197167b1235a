// src/comm/executor.h — runs the operations of one group in order, on whoever comes first.
//
// Operations form a queue. A blocking call that finds it empty runs in its caller, without a thread
// switch. Operations that were submitted to finish later are run by the executor's thread, or by a
// thread that waits for one of them: a waiter would only sleep otherwise.
//
// Note [Operations inside callbacks]
// Collectives have to be in the same order on all ranks. The callbacks of an operation's future run
// before the next operation of the queue, on the thread that ran it. What a callback starts in the
// same group runs there and then, and is completed when the call returns, also if it was to finish
// later: no other thread could run it before the callback ends, which may be waiting for it. So the
// order is the same on all ranks, however far their programs have come with what follows: an
// operation, what its callbacks start, the next one. Numbers are given in this order, when an
// operation begins.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/own_process.h"
#include "tessera/comm/error.h"

namespace tessera::comm {

class Executor;

/// One submitted operation, as c10d knows it.
class EngineWork final : public c10d::Work {
 public:
  using Run = std::function<void(EngineWork&)>;

  /// `is_met`: whether the operation, run now, would find all other ranks there. `inputs`: what
  /// profilers are told, under `title`, which stays.
  EngineWork(std::shared_ptr<Executor> executor, int rank, c10d::OpType type, const char* title,
             std::uint64_t sequence, std::vector<at::Tensor> outputs, Run run,
             std::function<bool()> is_met = nullptr,
             const std::optional<std::vector<at::Tensor>>& inputs = std::nullopt);

  /// `announce` tells the peers that the operation will come. It neither waits nor throws. Called
  /// when the operation is queued, unless one that was not announced is before it. Set before it
  /// is queued.
  void set_announcement(std::function<void()> announce) { announce_ = std::move(announce); }
  /// How many numbers the operation takes; set before it is queued.
  void set_num_steps(std::uint64_t num_steps) noexcept { num_steps_ = num_steps; }
  /// How long the callbacks of others may keep it waiting; set before it is queued. 0: for ever.
  void set_limit(std::chrono::milliseconds limit) noexcept { limit_ = limit; }
  /// The first number of the operation in the order in which the executor runs them. Known to
  /// its announcement and while it runs; see Note [Operations inside callbacks].
  std::uint64_t position() const noexcept { return position_; }

  bool isCompleted() override;
  /// Whether `wait` would find it completed, or all ranks there to run it with.
  bool is_ready();
  bool isSuccess() const override;
  /// Waits, running queued operations meanwhile. A positive `timeout` bounds this wait only; the
  /// operation keeps its own limit.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  /// As getFuture, for callbacks that start no operation.
  c10::intrusive_ptr<c10::ivalue::Future> quiet_future();
  std::uint64_t getSequencenumber() const override { return sequence_; }
  int sourceRank() const override { return source_rank_; }

  void set_source_rank(int source_rank) noexcept { source_rank_ = source_rank; }

 private:
  friend class Executor;
  /// Runs the operation and completes it; never throws.
  void execute() noexcept;
  void complete(std::exception_ptr error, bool has_run = false);
  c10::intrusive_ptr<c10::ivalue::Future> future_locked();
  bool may_call_back() const;

  std::shared_ptr<Executor> executor_;
  const std::uint64_t sequence_;
  std::vector<at::Tensor> outputs_;
  Run run_;
  std::function<bool()> is_met_;
  std::function<void()> announce_;
  std::chrono::milliseconds limit_{0};
  std::uint64_t num_steps_ = 1;
  std::uint64_t position_ = 0;  // guarded by the executor's mutex until it runs
  bool is_announced_ = false;   // guarded by the executor's mutex
  std::chrono::steady_clock::time_point queued_at_{};  // guarded by the executor's mutex
  int source_rank_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when first asked for; guarded by mutex_
  bool is_quiet_ = true;  // callbacks of the future start nothing; guarded by mutex_
};

/// The future of `work`, for callbacks that start no operation of a group.
c10::intrusive_ptr<c10::ivalue::Future> quiet_future(c10d::Work& work);

/// The queue and its thread. Thread-safe; owned by a shared_ptr.
class Executor : public std::enable_shared_from_this<Executor> {
 public:
  struct Options {
    /// Operations wait for somebody else more than they compute, so that the thread should run as
    /// soon as it is woken.
    bool is_relay = false;
    /// All ranks run the operations in the same order; see Note [Operations inside callbacks].
    bool is_ordered = true;
    /// Told why operations are given up: a callback does not return, or there is no thread to run
    /// them.
    std::function<void(ErrorKind, const std::string&)> on_given_up = nullptr;
  };
  Executor() : Executor(Options{}) {}
  explicit Executor(Options options) : options_(std::move(options)) {}
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Runs `work` after everything submitted before it, and returns when it is done. Inside a
  /// callback it runs at once; see Note [Operations inside callbacks].
  void run_now(const c10::intrusive_ptr<EngineWork>& work);
  /// Queues `work` and returns. Inside a callback of an ordered executor as run_now. Both throw an
  /// Error of kind unavailable, with nothing queued or announced, if there is no thread to run it.
  void run_later(const c10::intrusive_ptr<EngineWork>& work);
  /// Returns when `work` is completed, running queued operations meanwhile.
  void help_until_completed(EngineWork& work);
  /// Whether `work` is next, with nobody inside an operation, and `holds` then, which is asked in
  /// that state.
  bool is_next(const EngineWork& work, const std::function<bool()>& holds);
  /// Ends the thread after the operation it is at; what is still queued fails with `reason`.
  void stop(const std::string& reason);

 private:
  friend class EngineWork;
  using Clock = std::chrono::steady_clock;

  void thread_loop();
  /// Before `work` is announced or queued. `lock` is held on entry and on return, and let go if
  /// this throws.
  void start_thread_for(const EngineWork& work, std::unique_lock<std::mutex>& lock);
  /// Fails what a callback keeps waiting for longer than its limit.
  void watch_loop();
  std::vector<c10::intrusive_ptr<EngineWork>> take_overdue();
  /// Without a thread for it callbacks have no limit until the next of them begins.
  void start_watch() noexcept;
  /// Numbers `work`, which is about to begin, and marks it as running. The mutex is held.
  void begin_running(EngineWork& work);
  bool is_in_callback() const { return callback_thread_ == std::this_thread::get_id(); }
  /// Runs `work` inside a callback. `lock` is held on entry and on return.
  void run_nested(std::unique_lock<std::mutex>& lock, EngineWork& work);
  /// Runs `work` if this thread is inside a callback; otherwise returns false.
  bool run_in_callback(EngineWork& work);
  void run_front_nested(std::unique_lock<std::mutex>& lock);
  bool may_announce() const;
  c10::intrusive_ptr<EngineWork> take_front();
  /// Around the callbacks of an operation that has run.
  void begin_callbacks(bool are_quiet);
  void end_callbacks();
  /// Runs the front of the queue. `lock` is held on entry and on return. What was run is returned,
  /// because with it the last reference to this executor may go.
  [[nodiscard]] c10::intrusive_ptr<EngineWork> run_front(std::unique_lock<std::mutex>& lock);
  /// Says that nobody is inside `work` any more. The mutex is held.
  void end_running(const EngineWork& work);

  const Options options_;
  const pid_t maker_ = own_pid();
  std::mutex mutex_;
  // Two conditions, so that blocking calls do not wake the thread when there is nothing for it to
  // do.
  std::condition_variable thread_wake_;
  std::condition_variable helpers_wake_;
  int num_helpers_ = 0;
  std::deque<c10::intrusive_ptr<EngineWork>> queue_;
  bool is_running_ = false;  // somebody is inside an operation or its callbacks
  EngineWork* running_ = nullptr;
  std::uint64_t next_position_ = 0;
  std::thread::id callback_thread_;    // who is inside callbacks; nobody inside their operations
  Clock::time_point callbacks_since_;  // or since they last started something
  std::condition_variable watch_wake_;
  int num_silent_ = 0;  // operations queued or running that were not announced
  bool is_stopped_ = false;
  std::thread thread_;
  std::thread watch_;  // starts when a callback first keeps operations waiting
};

}  // namespace tessera::comm
