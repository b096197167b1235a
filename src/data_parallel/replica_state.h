// src/data_parallel/replica_state.h — what a Replica is between and during iterations.

#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "data_parallel/arrival_watch.h"
#include "data_parallel/bucket_reducer.h"
#include "data_parallel/gradient_places.h"
#include "tessera/comm/group.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/replica.h"

namespace tessera::comm {
class EngineBackend;
}

namespace tessera::data_parallel {

/// The engine that carries tensors of `device`, if it is one of ours: those compare what the ranks
/// call. Null otherwise.
const comm::EngineBackend* engine_of(const comm::Group& group, c10::Device device);

using Moment = std::chrono::steady_clock::time_point;

/// One forward and the backward that belongs to it.
struct Iteration {
  std::size_t num_outputs = 0;  // that a gradient may flow into
  std::vector<bool> has_gradient;
  std::size_t num_with_gradient = 0;
  bool is_first_static = false;  // learns how often each gradient arrives
  bool is_watched = false;       // a backward is under way that will say when it ends
  bool has_begun = false;
  bool has_ended = false;
};

/// When things happened in the last synchronised iteration.
struct Timeline {
  Moment forward_begin, forward_end, first_bucket, last_bucket, end;
  std::int64_t num_buckets = 0;
};

/// Gradients of delayed parameters of one type, in one piece.
struct DelayedGroup {
  at::Tensor buffer;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> views;
};

class Replica::State final : public std::enable_shared_from_this<Replica::State> {
 public:
  State(ModelParts parts, const comm::Group& group, Options options);
  ~State();

  /// What needs a shared pointer to this; once, right after construction.
  void start();

  void before_forward(const JoinOptions* join);
  std::vector<at::Tensor> after_forward(std::vector<at::Tensor> outputs);
  void prepare_for_backward(std::vector<at::Tensor> outputs);
  void shadow_iteration(const JoinOptions& join);
  int finish_join(bool is_last_joiner);

  void register_comm_hook(std::shared_ptr<CommHook> hook);
  const std::shared_ptr<CommHook>& comm_hook() const noexcept { return user_hook_; }
  void register_buffer_hook(BufferHook hook, BufferHookPlace place);
  void sync_buffers_now();
  void set_static_graph();
  void update_process_group(const comm::Group& group);
  void reset();
  void check_finalized();

  /// Starts the reduction of one bucket. On the thread of backward; the reducer's lock is held.
  FuturePtr reduce(c10d::GradBucket& bucket);

  double divisor() const noexcept;
  OverlapReport overlap_report() const;

  Options options;
  comm::Group group;
  ModelParts parts;
  std::vector<NamedParameter> kept;     // neither ignored; equal on all ranks
  std::vector<NamedParameter> reduced;  // of these, in the reducer
  std::vector<NamedParameter> frozen;   // of these, without gradient
  std::shared_ptr<BucketReducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
  std::unique_ptr<GradientPlaces> places;  // null where gradients are copied into buckets
  bool require_backward_grad_sync = true;
  bool require_forward_param_sync = true;
  bool has_sink_clone = true;

 private:
  void check_arguments();
  void delay_parameters();
  void build();
  /// Forgets the order of the buckets.
  void rebuild();
  void attach_hook();
  void announce_user_hook();
  void end_hook_step();
  void register_parameters();

  bool syncs_forward_buffers() const;
  std::vector<NamedTensor> current_buffers();
  void broadcast_state(int source, bool with_buffers);
  void sync_buffers(int source);
  void run_buffer_hook(bool is_shadow);
  FuturePtr average(at::Tensor& buffer);
  /// Who is active and what the active ranks do in this iteration.
  struct Control {
    int source = 0;  // the highest active rank
    int num_active = 0;
    bool has_sync = false;
    bool has_buffers = false;
    bool has_gradients = false;
  };
  void set_join_divisor(int num_active, const JoinOptions& join);
  Control exchange_control(bool is_active, bool has_buffers);
  /// Makes the reducer expect a backward from `outputs`. What the caller gets instead of them.
  std::vector<at::Tensor> expect_backward(std::vector<at::Tensor> outputs, bool can_replace);
  void watch(std::vector<at::Tensor>& outputs, bool is_first_static);
  /// Where outputs do not tell: notices by the first gradient that a backward has begun.
  void watch_parameters();
  void begin_backward(const std::shared_ptr<Iteration>& iteration);
  /// Reduces all buckets at the end of a static graph's first backward.
  void end_first_static_backward();
  void end_backward(const std::shared_ptr<Iteration>& iteration);
  /// Forgets a backward that an exception has ended, once all ranks have said that theirs ended at
  /// the same place. Collective; raises on all ranks if that is not so.
  void drop_cut_backward();
  void wait_for_buckets();
  /// When buckets were ready, where the reducer does not tell us.
  void note_buckets();
  [[noreturn]] void throw_unfinished();
  /// Makes gradients that are views of their buckets ordinary tensors of the same memory.
  void hide_views() const;
  void check_frozen() const;
  void point_delayed_gradients();
  void reduce_delayed();
  void choose_graph();
  void note_usage();

  bool is_alone_ = false;           // one rank and nothing to do for it
  bool has_shared_memory_ = false;  // the engine averages while it adds
  bool has_overlap_ = true;         // buckets are reduced beside backward
  bool has_hook_ = false;           // the reducer calls `reduce`
  std::shared_ptr<CommHook> user_hook_;
  bool is_hook_step_open_ = false;  // buckets have been given to it, end_step has not
  std::size_t num_buffers_ = 0;     // when last asked
  BufferHook buffer_hook_;
  BufferHookPlace buffer_hook_place_ = BufferHookPlace::kPostForward;
  bool has_failed_ = false;  // a hook threw; the reducer has to forget the backward
  bool is_shadowing_ = false;
  bool has_had_forward_ = false;
  bool has_had_sync_ = false;
  bool is_first_static_done_ = false;
  std::optional<double> join_divisor_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::shared_ptr<Iteration> iteration_;
  std::vector<ArrivalWatch> parameter_watches_;
  bool is_watching_parameters_ = false;
  Timeline timeline_;
  std::vector<DelayedGroup> delayed_;
  std::optional<ArrivalWatch> delayed_trigger_;
  bool has_delayed_sync_ = true;
  // What the automatic choice has seen.
  int num_watched_ = 0;
  bool has_unused_ = false;
  bool has_changed_ = false;
  at::Tensor last_used_;
};

}  // namespace tessera::data_parallel
