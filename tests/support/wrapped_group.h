// tests/support/wrapped_group.h — a group that counts what passes through it, and may slow it down.

#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tessera/comm/group.h"

namespace tessera::testing {

/// What a wrapped group has seen on this rank.
struct Traffic {
  std::atomic<std::int64_t> num_calls{0};
  std::atomic<std::int64_t> num_all_to_alls{0};
  std::atomic<std::int64_t> sent_bytes{0};      // to other ranks, by all-to-alls
  std::atomic<std::int64_t> received_bytes{0};  // from other ranks, by all-to-alls

  void reset() { num_calls = num_all_to_alls = sent_bytes = received_bytes = 0; }
};

/// Passes collectives on to another group's engine. All-to-alls take at least `bytes / bandwidth`
/// longer than they are submitted, like a link of that bandwidth; waiting for it uses no processor.
class WrappedBackend final : public c10d::Backend {
 public:
  WrappedBackend(const comm::Group& inner, std::shared_ptr<Traffic> traffic,
                 double bytes_per_second)
      : Backend(inner.rank(), inner.size()),
        inner_(inner.process_group()->getBackend(c10::DeviceType::CPU)),
        traffic_(std::move(traffic)),
        bytes_per_second_(bytes_per_second) {}

  const std::string getBackendName() const override { return "wrapped"; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& o) override {
    ++traffic_->num_calls;
    return inner_->allreduce(tensors, o);
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& o) override {
    ++traffic_->num_calls;
    return inner_->broadcast(tensors, o);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& o) override {
    ++traffic_->num_calls;
    return inner_->_allgather_base(out, in, o);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& o) override {
    ++traffic_->num_calls;
    return inner_->_reduce_scatter_base(out, in, o);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<std::int64_t>& out_rows,
                        std::vector<std::int64_t>& in_rows,
                        const c10d::AllToAllOptions& o) override {
    ++traffic_->num_calls;
    ++traffic_->num_all_to_alls;
    const std::int64_t sent = remote_bytes(in, in_rows);
    traffic_->sent_bytes += sent;
    traffic_->received_bytes += remote_bytes(out, out_rows);
    const WorkPtr work = inner_->alltoall_base(out, in, out_rows, in_rows, o);
    if (bytes_per_second_ <= 0) return work;
    const auto duration =
        std::chrono::duration<double>(static_cast<double>(sent) / bytes_per_second_);
    const auto arrival = std::chrono::steady_clock::now() +
                         std::chrono::duration_cast<std::chrono::steady_clock::duration>(duration);
    return c10::make_intrusive<SlowWork>(work, arrival);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return inner_->barrier(o); }

 private:
  class SlowWork final : public c10d::Work {
   public:
    SlowWork(WorkPtr inner, std::chrono::steady_clock::time_point arrival)
        : inner_(std::move(inner)), arrival_(arrival) {}
    bool wait(std::chrono::milliseconds timeout) override {
      const bool is_done = inner_->wait(timeout);
      std::this_thread::sleep_until(arrival_);
      return is_done;
    }
    bool isCompleted() override {
      return inner_->isCompleted() && std::chrono::steady_clock::now() >= arrival_;
    }

   private:
    WorkPtr inner_;
    std::chrono::steady_clock::time_point arrival_;
  };

  std::int64_t remote_bytes(const at::Tensor& rows, const std::vector<std::int64_t>& counts) const {
    if (rows.size(0) == 0) return 0;
    const auto row_bytes = static_cast<std::int64_t>(rows.nbytes()) / rows.size(0);
    const std::int64_t own = counts.empty() ? rows.size(0) / getSize() : counts[getRank()];
    return (rows.size(0) - own) * row_bytes;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<Traffic> traffic_;
  double bytes_per_second_;
};

/// A group over `inner`'s engine that counts into `traffic`. `inner` must outlive it.
inline comm::Group wrapped_group(const comm::Group& inner, std::shared_ptr<Traffic> traffic,
                                 double bytes_per_second = 0) {
  auto process_group = c10::make_intrusive<c10d::ProcessGroup>(inner.rank(), inner.size());
  process_group->setBackend(
      c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
      c10::make_intrusive<WrappedBackend>(inner, std::move(traffic), bytes_per_second));
  return comm::Group(process_group);
}

}  // namespace tessera::testing
