// tessera/data_parallel/model_parts.h — a model as the tensors that have to be kept equal.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/core/export.h"

namespace tessera::data_parallel {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  bool is_sparse = false;  // its gradient is a sparse tensor
};

/// What DistributedDataParallel needs to know of a model, however it is written.
struct ModelParts {
  std::string name = "model";
  /// Each parameter once, under the first name it has in the walk through the modules.
  std::vector<NamedParameter> parameters;
  /// Asked anew at each use, because modules may replace their buffers. May be empty.
  std::function<std::vector<NamedTensor>()> buffers;
  bool has_sync_batch_norm = false;
  bool has_uninitialized = false;  // parameters without a shape; Python modules may have them
};

/// The parts of a LibTorch module. Modules are walked depth first in the order of registration;
/// embeddings with `sparse(true)` have sparse gradients. Not collective.
TESSERA_API ModelParts parts_of(const std::shared_ptr<torch::nn::Module>& module);

/// Parameters and buffers by name, each behind `prefix`; detached, sharing memory.
TESSERA_API std::map<std::string, at::Tensor> state_of(const torch::nn::Module& module,
                                                       const std::string& prefix = "");
/// Copies values in. Names may carry the prefix "module." or not. Throws ValueError naming what is
/// missing, unknown, or has another shape, before anything is changed.
TESSERA_API void load_state(torch::nn::Module& module,
                            const std::map<std::string, at::Tensor>& state);

}  // namespace tessera::data_parallel
