// src/comm/executor.h — runs the operations of one group in order, on whoever comes first.
//
// Operations form a queue. A blocking call that finds it empty runs in its caller, without a thread
// switch. Operations that were submitted to finish later are run by the executor's thread, or by a
// thread that waits for one of them: a waiter would only sleep otherwise.

#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::comm {

class Executor;

/// One submitted operation, as c10d knows it.
class EngineWork final : public c10d::Work {
 public:
  using Run = std::function<void(EngineWork&)>;

  /// `is_met`: whether the operation, run now, would find all other ranks there.
  EngineWork(std::shared_ptr<Executor> executor, int rank, c10d::OpType type, const char* title,
             std::uint64_t sequence, std::vector<at::Tensor> outputs, Run run,
             std::function<bool()> is_met = nullptr);

  /// `announce` tells the peers that the operation will come. It neither waits nor throws. Called
  /// when the operation is queued, unless one that was not announced is before it. Set before it
  /// is queued.
  void set_announcement(std::function<void()> announce) { announce_ = std::move(announce); }

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
  std::uint64_t getSequencenumber() const override { return sequence_; }
  int sourceRank() const override { return source_rank_; }

  void set_source_rank(int source_rank) noexcept { source_rank_ = source_rank; }

 private:
  friend class Executor;
  /// Runs the operation and completes it; never throws.
  void execute() noexcept;
  void complete(std::exception_ptr error);

  std::shared_ptr<Executor> executor_;
  const std::uint64_t sequence_;
  std::vector<at::Tensor> outputs_;
  Run run_;
  std::function<bool()> is_met_;
  std::function<void()> announce_;
  bool is_announced_ = false;  // guarded by the executor's mutex
  int source_rank_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when first asked for; guarded by mutex_
};

/// The queue and its thread. Thread-safe; owned by a shared_ptr.
class Executor : public std::enable_shared_from_this<Executor> {
 public:
  /// `is_relay`: operations wait for somebody else more than they compute, so that the thread
  /// should run as soon as it is woken.
  explicit Executor(bool is_relay = false) : is_relay_(is_relay) {}
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Runs `work` after everything submitted before it, and returns when it is done.
  void run_now(const c10::intrusive_ptr<EngineWork>& work);
  /// Queues `work` and returns.
  void run_later(const c10::intrusive_ptr<EngineWork>& work);
  /// Returns when `work` is completed, running queued operations meanwhile.
  void help_until_completed(EngineWork& work);
  /// Whether `work` is next, with nobody inside an operation, and `holds` then, which is asked in
  /// that state.
  bool is_next(const EngineWork& work, const std::function<bool()>& holds);
  /// Ends the thread after the operation it is at; what is still queued fails with `reason`.
  void stop(const std::string& reason);

 private:
  void thread_loop();
  /// Runs the front of the queue. `lock` is held on entry and on return. What was run is returned,
  /// because with it the last reference to this executor may go.
  [[nodiscard]] c10::intrusive_ptr<EngineWork> run_front(std::unique_lock<std::mutex>& lock);
  /// Says that nobody is inside `work` any more. The mutex is held.
  void end_running(const EngineWork& work);

  const bool is_relay_;
  std::mutex mutex_;
  // Two conditions, so that blocking calls do not wake the thread when there is nothing for it to
  // do.
  std::condition_variable thread_wake_;
  std::condition_variable helpers_wake_;
  int num_helpers_ = 0;
  std::deque<c10::intrusive_ptr<EngineWork>> queue_;
  bool is_running_ = false;  // somebody is inside an operation
  int num_silent_ = 0;       // operations queued or running that were not announced
  bool is_stopped_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm
