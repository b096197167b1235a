// tessera/data_parallel/model_averaging.h — replicas that go their own way and meet from time to
// time (post-local SGD).
//
// The hook averages gradients over all ranks for a while and then only within a subgroup, or not at
// all; an averager, called after each optimizer step, averages the parameters now and then.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/data_parallel/comm_hook.h"

namespace tessera::data_parallel {

struct PostLocalSgdOptions {
  /// The ranks that average gradients after `start_step`; needed if `reduce_in_subgroup`.
  std::optional<comm::Group> subgroup;
  /// Steps in which all ranks average.
  std::int64_t start_step = 0;
  /// After that, average in the subgroup. Otherwise each rank keeps its own gradients.
  bool reduce_in_subgroup = true;
};

TESSERA_API std::shared_ptr<CommHook> post_local_sgd_hook(const PostLocalSgdOptions& options);

/// Replaces `parameters` by their average over `group`. Collective; every rank gives the same
/// shapes. One all-reduce per dtype.
TESSERA_API void average_parameters(const std::vector<at::Tensor>& parameters,
                                    const comm::Group& group);

/// Averages every `period` steps once `warmup_steps` are over.
class TESSERA_API PeriodicModelAverager {
 public:
  PeriodicModelAverager(comm::Group group, std::int64_t period, std::int64_t warmup_steps = 0);

  /// Call after every optimizer step. Collective on the steps that average.
  void average_parameters(const std::vector<at::Tensor>& parameters);

  std::int64_t step() const noexcept { return step_; }
  void set_step(std::int64_t step) noexcept { step_ = step; }

 private:
  comm::Group group_;
  std::int64_t period_;
  std::int64_t warmup_steps_;
  std::int64_t step_ = 0;
};

/// Averages in small groups often and in larger ones rarely: on each step, the level with the
/// longest period that divides the step.
class TESSERA_API HierarchicalModelAverager {
 public:
  struct Level {
    std::int64_t period;
    comm::Group group;
  };

  /// Periods ascend, and so do the groups.
  explicit HierarchicalModelAverager(std::vector<Level> levels, std::int64_t warmup_steps = 0);

  /// Levels of blocks of neighbouring ranks: `sizes` gives (period, ranks per block), both
  /// ascending, each size dividing the next, the last one the whole group. Collective.
  static std::vector<Level> blocks_of(
      const comm::Group& group, const std::vector<std::pair<std::int64_t, std::int64_t>>& sizes);

  /// Call after every optimizer step. Collective on the steps that average.
  void average_parameters(const std::vector<at::Tensor>& parameters);

  std::int64_t step() const noexcept { return step_; }
  void set_step(std::int64_t step) noexcept { step_ = step; }

 private:
  std::vector<Level> levels_;
  std::int64_t warmup_steps_;
  std::int64_t step_ = 0;
};

}  // namespace tessera::data_parallel
