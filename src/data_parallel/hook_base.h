// data_parallel/hook_base.h — what the hooks share: collectives that count their bytes, futures,
// and a pipeline for hooks of several dependent collectives.

#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/core/check.h"
#include "tessera/data_parallel/comm_hook.h"

namespace tessera::data_parallel {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// A future of a tensor that lives where `like` does.
FuturePtr pending(const at::Tensor& like);
FuturePtr completed(const at::Tensor& value);
/// The tensor in a future's value: a tensor, or the first of a list of them.
at::Tensor tensor_in(const c10::IValue& value);
/// Continues with `step` on the thread that completes `future`. `step` must not wait for anything.
FuturePtr then(const FuturePtr& future, const at::Tensor& like,
               std::function<at::Tensor(at::Tensor)> step);

/// Pieces of a flat tensor, one per parameter: one-dimensional, or as the parameters see them. See
/// Bucket.
std::vector<at::Tensor> slices_of(const at::Tensor& flat,
                                  const std::vector<at::Tensor>& parameters);
std::vector<at::Tensor> views_of(const at::Tensor& flat, const std::vector<at::Tensor>& parameters);

/// Tells the allocator that a GPU tensor made elsewhere is used on this thread's stream, as
/// callbacks do with what they captured.
void use_here(const at::Tensor& tensor);

/// Whether the engine between the ranks adds in rank order, each element by itself.
bool adds_in_rank_order(const comm::Group& group);

/// Starts collectives and counts their bytes.
class Sender {
 public:
  /// In place: the sum over the ranks.
  WorkPtr start_sum(at::Tensor tensor, const comm::Group& group);
  /// In place: the sum over the ranks divided by `divisor`.
  WorkPtr start_average(at::Tensor tensor, const comm::Group& group, double divisor);
  /// Every rank's `tensor`, one row each, in `rows`.
  WorkPtr start_gather(at::Tensor tensor, at::Tensor& rows, const comm::Group& group);
  /// The average of a bucket as it is. Hooks that compress leave sparse gradients alone.
  FuturePtr average_plainly(const Bucket& bucket);

  std::int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  void count(const at::Tensor& tensor);
  std::atomic<std::int64_t> bytes_{0};
};

/// A hook that starts collectives itself.
template <class Base = CommHook>
class Sending : public Base {
 public:
  std::int64_t bytes_sent() const override { return sender_.bytes(); }

 protected:
  Sender& sender() { return sender_; }

 private:
  Sender sender_;
};

/// A hook that works on what another hook gets or returns.
template <class Base = CommHook>
class Wrapping : public Base {
 public:
  Wrapping(std::shared_ptr<CommHook> inner, std::string name)
      : inner_(std::move(inner)), name_(std::move(name)) {
    TESSERA_CHECK_VALUE(inner_ != nullptr, "ddp.hook: '", name_, "' needs a hook to wrap.");
  }
  void end_step() override { inner_->end_step(); }
  void flush() override { inner_->flush(); }
  void reset() override { inner_->reset(); }
  std::string name() const override { return name_ + "(" + inner_->name() + ")"; }
  bool consumes_gradients() const override { return inner_->consumes_gradients(); }
  HookState state() const override { return inner_->state(); }
  void load_state(const HookState& state) override { inner_->load_state(state); }
  std::int64_t bytes_sent() const override { return inner_->bytes_sent(); }

 protected:
  CommHook& inner() { return *inner_; }

 private:
  std::shared_ptr<CommHook> inner_;
  std::string name_;
};

/// Buckets on their way through several dependent collectives.
///
/// Note [Follow-up collectives]
/// The second collective of a bucket needs the result of the first. Issued from a callback it would
/// come in another order on every rank. So all are issued here, on the thread that runs backward,
/// by a schedule that depends on the bucket's place only: a new bucket starts its first step, then
/// each earlier bucket does one step more. A bucket's collective thus has the time of one bucket's
/// backward before anybody waits for it. `flush` takes all buckets to their end in the same way.
class Pipeline {
 public:
  /// A step may wait for what an earlier step started, and start something new.
  using Step = std::function<void()>;

  /// Runs the first of `steps`, then one step of each earlier bucket. The future gets `result`
  /// after the last step.
  FuturePtr add(std::vector<Step> steps, const at::Tensor& result);
  void flush();
  /// Gives up what is on its way; futures get an error.
  void reset();

 private:
  struct Job {
    std::deque<Step> steps;
    at::Tensor result;
    FuturePtr future;
  };
  void advance(std::size_t count);
  std::deque<Job> jobs_;
};

}  // namespace tessera::data_parallel
