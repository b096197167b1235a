// src/comm/backend.h — a Transport dressed as a c10d::Backend: tensors, queue, futures.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/executor.h"
#include "comm/lent_memory.h"
#include "comm/monitor.h"
#include "comm/own_process.h"
#include "comm/transport.h"
#include "tessera/comm/error.h"

namespace tessera::comm {

/// The engine behind groups made here, and behind `init_process_group("shm")`.
///
/// Collectives are checked for local mistakes first (device, types, sizes), numbered, and run in
/// the order of their calls. Point-to-point operations run beside them, in order per peer and
/// direction.
class EngineBackend final : public c10d::Backend {
 public:
  EngineBackend(std::shared_ptr<Transport> transport, std::shared_ptr<GroupMonitor> monitor,
                std::chrono::milliseconds timeout);
  ~EngineBackend() override;

  const std::string getBackendName() const override { return std::string(transport_->name()); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<std::int64_t>& output_rows,
                                               std::vector<std::int64_t>& input_rows,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  void enableCollectivesTiming() override {}

  /// See lend_async. `found` is filled in when the work is done.
  c10::intrusive_ptr<c10d::Work> lend(std::vector<at::Tensor> inputs,
                                      std::vector<std::int64_t> counts,
                                      std::shared_ptr<std::vector<at::Tensor>> found);
  LentMemory& lent_memory() noexcept { return *lent_memory_; }

  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  void abort() override;
  void shutdown() override;
  c10d::ErrorType getError() override;

  /// Ends the waits of all ranks; see Transport::abort. Never throws.
  void fail(FailureKind kind, const std::vector<int>& ranks, const std::string& reason) noexcept;

  /// Whether a fork made this process a child of the one that the group belongs to.
  bool is_inherited() const noexcept { return maker_ != own_pid(); }

  const GroupMonitor& monitor() const noexcept { return *monitor_; }
  Transport& transport() noexcept { return *transport_; }

 private:
  /// One collective inside an operation: gets its own Call with number and deadline filled in.
  using Step = std::function<void(Transport&, Call&)>;
  struct Submission {
    c10d::OpType type;
    const char* title;
    std::vector<at::Tensor> outputs;
    std::chrono::milliseconds timeout;
    bool is_async;
    int num_sequence = 1;                     // how many collectives it makes
    std::optional<Call> plan = std::nullopt;  // to be announced: its one collective
    std::vector<at::Tensor> inputs = {};      // what profilers are told; the outputs if empty
  };
  c10::intrusive_ptr<c10d::Work> submit(Submission submission, std::vector<Step> steps);
  /// Gathers inputs[i] of rank r into lists[i][r]; then copies the second of each pair to the
  /// first.
  c10::intrusive_ptr<c10d::Work> gather_lists(const std::vector<std::vector<at::Tensor>>& lists,
                                              const std::vector<at::Tensor>& inputs,
                                              std::vector<std::pair<at::Tensor, at::Tensor>> copies,
                                              const c10d::AllgatherOptions& opts);
  /// What profilers call the operation, as torch does: "shm:all_reduce". Stays.
  const char* event_name(std::string_view op) const noexcept;
  c10::intrusive_ptr<c10d::Work> submit_point_to_point(c10d::OpType type, const char* title,
                                                       at::Tensor tensor, int peer, int tag,
                                                       bool is_send);
  /// A message of a rank to itself is kept until it is received.
  void send_to_self(const at::Tensor& tensor, int tag);
  void recv_from_self(const Call& call, const at::Tensor& tensor, int tag);
  /// Whether operations pass memory on to somebody else, rather than work on it here.
  bool is_relay() const noexcept { return transport_->name() == "gloo"; }
  /// `is_ordered`: see Executor::Options.
  std::shared_ptr<Executor> make_executor(bool is_ordered);
  std::chrono::milliseconds limit_of(std::chrono::milliseconds timeout) const noexcept;
  Call stamped(Call call, std::uint64_t sequence, std::chrono::milliseconds timeout) const;
  [[noreturn]] void raise(const Failure& failure);
  /// Throws ValueError, naming both processes, in a forked child.
  void check_own(const char* title) const;

  const pid_t maker_ = own_pid();
  std::shared_ptr<Transport> transport_;
  std::shared_ptr<GroupMonitor> monitor_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Executor> collectives_;
  std::shared_ptr<LentMemory> lent_memory_ = std::make_shared<LentMemory>();
  std::mutex lanes_mutex_;
  std::map<std::pair<bool, int>, std::shared_ptr<Executor>> lanes_;  // (is send, peer)
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<std::uint64_t> point_to_point_sequence_{0};
  std::mutex own_messages_mutex_;
  std::condition_variable own_messages_changed_;
  std::map<int, std::deque<at::Tensor>> own_messages_;  // from this rank to itself, by tag
  std::atomic<bool> has_failed_{false};
};

/// Error kind of a transport's failure.
ErrorKind error_kind(FailureKind kind) noexcept;
FailureKind failure_kind(ErrorKind kind) noexcept;

/// Calls `visit` for every engine alive in this process.
void for_each_backend(const std::function<void(EngineBackend&)>& visit);

}  // namespace tessera::comm
