// Iterations of ranks that have run out of batches while others have not.

#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include "data_parallel/replica_state.h"
#include "tessera/comm/collectives.h"

namespace tessera::data_parallel {

Replica::State::Control Replica::State::exchange_control(bool is_active, bool has_buffers) {
  const std::size_t size = group.size();
  std::vector<std::int64_t> words(size + 3, 0);
  if (is_active) {
    const bool has_gradients = at::GradMode::is_enabled();
    words[group.rank()] = 1;
    words[size] = has_gradients && require_backward_grad_sync ? 1 : 0;
    words[size + 1] = has_buffers ? 1 : 0;
    words[size + 2] = has_gradients ? 1 : 0;
  }
  at::Tensor sums = at::tensor(words, at::kLong).to(kept.front().tensor.device());
  comm::all_reduce_(sums, group);
  sums = sums.cpu();
  const std::int64_t* values = sums.const_data_ptr<std::int64_t>();
  Control control;
  for (std::size_t rank = 0; rank < size; ++rank) {
    if (values[rank] == 0) continue;
    control.source = static_cast<int>(rank);
    ++control.num_active;
  }
  control.has_sync = values[size] != 0;
  control.has_buffers = values[size + 1] != 0;
  control.has_gradients = values[size + 2] != 0;
  return control;
}

void Replica::State::set_join_divisor(int num_active, const JoinOptions& join) {
  if (join.divide_by_initial_world_size) {
    join_divisor_.reset();
  } else {
    join_divisor_ = options.divisor.value_or(group.size()) * num_active / group.size();
  }
}

void Replica::State::shadow_iteration(const JoinOptions& join) {
  if (!reducer) return;
  is_shadowing_ = true;
  timeline_.num_buckets = 0;
  const Control control = exchange_control(/*is_active=*/false, false);
  set_join_divisor(control.num_active, join);
  if (control.has_gradients) reducer->rebuild();
  if (control.has_buffers) {
    if (buffer_hook_) {
      run_buffer_hook(/*is_shadow=*/true);
    } else {
      sync_buffers(control.source);
    }
  }
  if (control.has_gradients && buffer_hook_ &&
      buffer_hook_place_ == BufferHookPlace::kPostForward) {
    run_buffer_hook(/*is_shadow=*/true);
  }
  require_forward_param_sync = control.has_sync;
  if (control.has_sync) reducer->shadow();
  works_.clear();
  is_shadowing_ = false;
}

int Replica::State::finish_join(bool is_last_joiner) {
  const std::vector<std::int64_t> words{is_last_joiner ? group.rank() : -1};
  at::Tensor source = at::tensor(words, at::kLong).to(kept.front().tensor.device());
  comm::all_reduce_(source, group, comm::Reduction::kMax);
  const int last = static_cast<int>(source.item<std::int64_t>());
  broadcast_state(last, syncs_forward_buffers());
  join_divisor_.reset();
  return last;
}

}  // namespace tessera::data_parallel
