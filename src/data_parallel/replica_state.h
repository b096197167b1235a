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

#include "data_parallel/bucket_reducer.h"
#include "data_parallel/delayed_parameters.h"
#include "data_parallel/gradient_places.h"
#include "data_parallel/replica_log.h"
#include "tessera/comm/group.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/replica.h"

namespace tessera::data_parallel {

using Moment = std::chrono::steady_clock::time_point;

/// One forward and the backward that belongs to it.
struct Iteration {
  enum class Progress { kExpected, kRunning, kEnded };  // of the backward
  Progress progress = Progress::kExpected;
  std::vector<bool> has_gradient;    // by output that a gradient may flow into
  bool is_first_static = false;      // learns how often each gradient arrives
  bool begins_with_arrival = false;  // outputs do not tell that the backward runs
};

/// When things happened in the last synchronised iteration.
struct Timeline {
  Moment forward_begin, forward_end, first_bucket, last_bucket, end;
  std::int64_t num_buckets = 0;
};

/// What automatic_graph has seen.
struct GraphRecord {
  int num_backwards = 0;
  bool has_unused = false;
  bool has_changed = false;
  at::Tensor last_used;
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

  double divisor() const noexcept;
  OverlapReport overlap_report() const;

  Options options;
  comm::Group group;
  ModelParts parts;
  std::vector<NamedParameter> kept;        // neither ignored; equal on all ranks
  std::vector<NamedParameter> reduced;     // of these, in the reducer
  std::vector<NamedParameter> frozen;      // of these, without gradient
  std::unique_ptr<ReplicaLog> log;         // these three null where all parameters are delayed
  std::unique_ptr<GradientPlaces> places;  // null where gradients are copied into buckets
  std::unique_ptr<BucketReducer> reducer;
  bool require_backward_grad_sync = true;
  bool require_forward_param_sync = true;
  bool has_sink_clone = true;

 private:
  void check_arguments();
  void register_parameters();
  /// Makes the reducer and what belongs to it, anew if it is there: it forgets the order of the
  /// buckets.
  void build();
  void announce_user_hook();
  /// The reducer divides gradients as it copies them. Otherwise the engine or a hook does.
  bool divides_while_copying() const;

  bool syncs_forward_buffers() const;
  std::vector<NamedTensor> current_buffers();
  void broadcast_state(int source, bool with_buffers);
  void sync_buffers(int source);
  void run_buffer_hook(bool is_shadow);
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
  void begin_backward(const std::shared_ptr<Iteration>& iteration);
  void end_backward(const std::shared_ptr<Iteration>& iteration);
  /// Starts the reduction of one bucket. On the thread of backward; the reducer's lock is held.
  FuturePtr reduce(std::size_t index, at::Tensor& buffer);
  FuturePtr average(at::Tensor& buffer);
  void end_hook_step();
  void wait_for_buckets();
  /// Forgets a backward that an exception has ended, once all ranks have said that theirs ended at
  /// the same place. Collective; raises on all ranks if that is not so.
  void drop_cut_backward();
  [[noreturn]] void throw_unfinished();
  /// Makes gradients that are views of their buckets ordinary tensors of the same memory.
  void hide_views() const;
  void check_frozen() const;
  void choose_graph();
  void note_usage();

  bool is_alone_ = false;           // one rank and nothing to do for it
  bool has_shared_memory_ = false;  // the engine averages while it adds
  bool has_overlap_ = true;         // buckets are reduced beside backward
  std::shared_ptr<CommHook> user_hook_;
  bool is_hook_step_open_ = false;  // buckets have been given to it, end_step has not
  std::size_t num_buffers_ = 0;     // when last asked
  BufferHook buffer_hook_;
  BufferHookPlace buffer_hook_place_ = BufferHookPlace::kPostForward;
  bool has_failed_ = false;  // a hook threw; the reducer has to forget the backward
  bool is_shadowing_ = false;
  bool has_had_forward_ = false;
  bool has_had_sync_ = false;
  std::optional<double> join_divisor_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::shared_ptr<Iteration> iteration_;
  Timeline timeline_;
  std::optional<DelayedParameters> delayed_;
  GraphRecord graph_;
};

}  // namespace tessera::data_parallel
