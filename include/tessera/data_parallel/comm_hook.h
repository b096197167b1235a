// tessera/data_parallel/comm_hook.h — how the gradients of one bucket become their average.
//
// Data parallelism hands each bucket of gradients, as soon as backward has filled it, to one
// CommHook. The hook says how the ranks combine it: plainly, in fewer bits, as low-rank factors,
// not at all, or in a way of the user's own.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::data_parallel {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// The gradients of some parameters, one after the other in one flat buffer. They are not yet
/// divided.
class TESSERA_API Bucket {
 public:
  /// `names` and `parameters` say whose gradients lie in `buffer`, in its order. `divisor` is what
  /// the sum over the ranks is divided by: the group's size, or under join the ranks still active.
  Bucket(std::size_t index, bool is_last, at::Tensor buffer, std::vector<std::string> names,
         std::vector<at::Tensor> parameters, comm::Group group, double divisor);

  /// Place of the bucket in this step; buckets come in this order on every rank.
  std::size_t index() const noexcept { return index_; }
  /// True for the last bucket of this step, also in a static graph's first step.
  bool is_last() const noexcept { return is_last_; }

  /// All gradients, flat; for a parameter with sparse gradients, that sparse gradient.
  const at::Tensor& buffer() const noexcept { return buffer_; }
  /// Replaces the buffer: same number of elements, any floating type.
  void set_buffer(at::Tensor buffer);
  bool is_sparse() const { return buffer_.is_sparse(); }

  /// The gradients as their parameters see them: the parameter's shape and, where the parameter is
  /// dense (channels_last included), its strides. Views of the buffer.
  std::vector<at::Tensor> gradients() const;
  /// The same views of another flat tensor, such as a hook's result.
  std::vector<at::Tensor> views_of(const at::Tensor& flat) const;
  /// Slices of `flat` (or of the buffer) in memory order, one per parameter, one-dimensional.
  std::vector<at::Tensor> slices_of(const at::Tensor& flat) const;

  const std::vector<std::string>& names() const noexcept { return names_; }
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  const comm::Group& group() const noexcept { return group_; }
  double divisor() const noexcept { return divisor_; }

 private:
  std::size_t index_;
  bool is_last_;
  at::Tensor buffer_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  comm::Group group_;
  double divisor_;
};

/// Named tensors and numbers that a hook wants to keep over a restart.
struct TESSERA_API HookState {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, std::int64_t> numbers;
  /// Names of tensors that differ from rank to rank and add up in the average; all others are equal
  /// on all ranks.
  std::set<std::string> local = {};
};

/// Combines a bucket's gradients over the ranks. One object serves all buckets of one model.
///
/// The caller promises: `reduce` is called on the thread that runs backward, once per bucket, in
/// the order of the index, the same on all ranks; then `end_step` once, after the last bucket and
/// before anybody waits for a future. A rank that has joined early calls both with buckets of
/// zeros.
///
/// A hook may issue collectives in `reduce` and `end_step` and may wait there. It must do neither
/// in a future's callback: callbacks run on the thread that completes the future, in no common
/// order.
class TESSERA_API CommHook {
 public:
  virtual ~CommHook() = default;

  /// Starts the reduction and returns at once with a future of the averaged gradients: a flat
  /// tensor of as many elements, which may be the buffer. The future may stay incomplete until
  /// end_step.
  ///
  /// Collective. What it throws, backward throws.
  virtual FuturePtr reduce(Bucket& bucket) = 0;

  /// Completes all futures given out, and counts the step. Collective.
  virtual void end_step() {}

  /// Completes all futures given out so far. For callers that cannot tell the last bucket.
  virtual void flush() {}

  /// Forgets what a step that failed half-way left behind. Not collective.
  virtual void reset() {}

  /// Shown in logs and in the manifest that ranks compare.
  virtual std::string name() const = 0;

  /// True if the hook has used the gradients up (it ran the optimizer): they need not be copied
  /// back to the parameters.
  virtual bool consumes_gradients() const { return false; }

  /// What to save and restore, keyed by parameter name.
  virtual HookState state() const { return {}; }
  virtual void load_state(const HookState& state);

  /// Bytes this rank has handed to collectives so far.
  virtual std::int64_t bytes_sent() const { return 0; }
};

}  // namespace tessera::data_parallel
