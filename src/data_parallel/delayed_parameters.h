// src/data_parallel/delayed_parameters.h — gradients that are reduced together, when that of one
// chosen parameter is there.

#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "data_parallel/arrival_watch.h"
#include "tessera/comm/group.h"
#include "tessera/data_parallel/model_parts.h"
#include "tessera/data_parallel/options.h"

namespace tessera::data_parallel {

class DelayedParameters {
 public:
  /// Those that `options` names. Calls `on_trigger` when backward reaches the chosen parameter.
  /// Throws ValueError for names that are no parameters.
  DelayedParameters(const ModelParts& parts, const Options& options,
                    std::function<void()> on_trigger);

  /// After a forward with gradients. `has_sync`: its backward reduces.
  void expect_backward(bool has_sync);
  /// Averages what has come, if a backward that reduces is expected. Collective then.
  void reduce(const comm::Group& group, double divisor);

 private:
  /// Gradients of one type, in one piece.
  struct Batch {
    at::Tensor buffer;
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> views;
  };
  std::vector<Batch> batches_;
  std::optional<ArrivalWatch> trigger_;
  bool has_sync_ = true;
};

}  // namespace tessera::data_parallel
