// tessera/data_parallel/replica.h — one rank's copy of a model, kept equal to the others'.
//
// This is DistributedDataParallel without the module: what runs before a forward, after it, and
// while backward runs. DistributedDataParallel (C++) and tessera.nn.parallel (Python) call it.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include "tessera/comm/group.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/export.h"
#include "tessera/data_parallel/join.h"
#include "tessera/data_parallel/model_parts.h"
#include "tessera/data_parallel/options.h"

namespace tessera::data_parallel {

class CommHook;

/// When a buffer hook runs.
enum class BufferHookPlace { kPreForward, kPostForward };

/// Gets the buffers by name and makes them equal in its own way. Its futures are waited for at the
/// end of the backward.
using BufferHook = std::function<std::vector<c10::intrusive_ptr<c10::ivalue::Future>>(
    const std::map<std::string, at::Tensor>& buffers)>;

/// Times of the last synchronised iteration, in seconds, and what they say.
struct OverlapReport {
  double forward = 0;
  double backward = 0;      // until the last gradient was computed
  double exposed_comm = 0;  // from then until the last bucket was reduced
  double comm = 0;          // from the first bucket's start to the last bucket's end
  std::int64_t num_buckets = 0;
  std::int64_t bytes = 0;
  std::string advice;  // one sentence; empty if there is nothing to gain
};

/// What is known about a replica: the keys of torch's logging data.
struct LoggingData {
  std::map<std::string, std::string> strings;
  std::map<std::string, std::int64_t> integers;
};

/// The tensors of one model on one rank, the buckets their gradients are reduced in, and the state
/// of the current iteration. Not thread-safe; one backward at a time.
class TESSERA_API Replica final : public Joinable {
 public:
  /// Collective over `group` unless `options.init_sync` is false. Checks the arguments, compares
  /// the models of all ranks, and copies rank 0's parameters and buffers to the others.
  ///
  /// Throws ValueError and c10::Error for arguments that make no sense; comm::Error(kMismatch), on
  /// all ranks with the same text, when the models or options differ.
  Replica(ModelParts parts, const comm::Group& group, Options options = {});
  ~Replica() override;
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  /// Before the model's forward. Collective while buffers are synchronised, and once to order the
  /// buckets.
  void before_forward();
  /// After it, with all tensors it returned. Returns what the caller must return instead. Not
  /// collective, except for buffer hooks.
  std::vector<at::Tensor> after_forward(std::vector<at::Tensor> outputs);

  /// Reduces the gradients of the next backward, from `outputs`, although its forward was made
  /// without synchronisation: for schedules that know only then which backward is the last. With
  /// find_unused_parameters all of `outputs` must be used. Not collective.
  void prepare_for_backward(std::vector<at::Tensor> outputs);

  /// Whether backwards reduce gradients; what counts is the value during the forward.
  bool require_backward_grad_sync() const noexcept;
  void set_require_backward_grad_sync(bool value) noexcept;

  /// Whether the next forward with gradients sends buffers, if there are any to send. A forward
  /// sets it: true if its backward reduces gradients.
  bool require_forward_param_sync() const noexcept;
  void set_require_forward_param_sync(bool value) noexcept;

  /// Reduces buckets with `hook` instead of averaging them. Once, before the first backward. Not
  /// collective, but all ranks must register the same one.
  void register_comm_hook(std::shared_ptr<CommHook> hook);
  /// The registered hook; null if there is none.
  std::shared_ptr<CommHook> comm_hook() const;
  /// Replaces the synchronisation of buffers.
  void register_buffer_hook(BufferHook hook, BufferHookPlace place = BufferHookPlace::kPostForward);

  /// Sends rank 0's buffers to all now, or runs the buffer hook: before all ranks evaluate, because
  /// forwards without gradients leave buffers alone. Collective.
  void sync_buffers();

  /// Before the first forward.
  void set_static_graph();
  /// Whether outputs are copied where unused parameters are looked for, so that a loss may change
  /// them in place. True unless set.
  void set_sink_clone(bool value) noexcept;
  /// From now on these ranks. This rank must be one of them. Not collective. Drops a backward that
  /// was cut short.
  void update_process_group(const comm::Group& group);
  /// Forgets a backward that was cut short by an exception; the next forward does so too. All ranks
  /// must have cut it short at the same place, or go on in another group.
  void reset();
  /// For gradients that are sparse: the rows that can occur, by parameter.
  void set_sparse_metadata(std::map<std::string, at::Tensor> metadata);

  /// Raises, naming them, if parameters got no gradient in the last backward.
  void check_finalized();
  /// Leaves gradients alone from now on.
  void remove_autograd_hooks();
  /// Times are logged in the first 10 iterations, then in every `sample_rate`-th.
  void set_sample_rate(int sample_rate);

  const comm::Group& group() const noexcept;
  const Options& options() const noexcept;
  /// Parameters whose gradients are reduced, in order.
  const std::vector<NamedParameter>& parameters() const noexcept;
  /// What sums are divided by in this iteration.
  double divisor() const noexcept;

  LoggingData logging_data();
  /// Puts an error of the caller's into the logging data.
  void log_error(const std::string& text);
  /// With find_unused_parameters: on how many ranks the last backward used each parameter.
  at::Tensor used_map() const;

  /// Whether every backward so far used the same parameters.
  bool is_graph_static() const;
  OverlapReport overlap_report();
  /// How the gradients are cut: for every bucket the names of its parameters, in the order of
  /// reduction.
  std::vector<std::vector<std::string>> buckets() const;

  /// For `join`.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  comm::Group join_group() const override;
  /// For callers with a join context of their own (torch's), instead of before_forward.
  void before_forward_joined(const JoinOptions& options);
  /// For the same: one iteration of a rank that has run out, and the end.
  void shadow_iteration(const JoinOptions& options);
  /// Returns the rank whose model all ranks got.
  int finish_join(bool is_last_joiner);

  class State;

 private:
  std::shared_ptr<State> state_;  // shared with callbacks of a backward that outlives this
};

/// Backwards of forwards made in this scope leave gradients local; they add up, and the next
/// synchronised backward reduces the sum. Scopes nest.
class TESSERA_API NoSync {
 public:
  explicit NoSync(Replica& replica);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Replica& replica_;
  bool outer_;
};

}  // namespace tessera::data_parallel
