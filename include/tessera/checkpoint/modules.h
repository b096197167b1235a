// tessera/checkpoint/modules.h — modules and optimizers of LibTorch as parts of a State.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/checkpoint/state.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

/// Adds the parameters and buffers of a module that every rank holds whole, as in data parallelism.
/// Names are `prefix` and the module's own. If there are embedding collections in it whose backward
/// steps the rows, adds the state of these optimizers too, under `optimizer_prefix`. Sharded
/// collections are placed as their plans say, under the names they would have on one rank: saved
/// with one plan, they load with any other, or into a collection that is not sharded.
TESSERA_API void add_module(State& state, const std::shared_ptr<torch::nn::Module>& module,
                            const std::string& prefix = "model.",
                            const std::string& optimizer_prefix = "optimizer.");

/// Adds tensors that every rank holds whole; `tensors` is asked for them, by name, at every save
/// and load.
TESSERA_API void add_tensors(State& state,
                             std::function<std::map<std::string, at::Tensor>()> tensors,
                             const std::string& prefix);

/// Adds the state of an optimizer of these parameters: `prefix`, the parameter's name, and the
/// optimizer's ("exp_avg"); each lies where its parameter lies. Step counters and learning rates
/// are values. SGD, Adam, AdamW, Adagrad and RMSprop; throws TypeError for others. The optimizer
/// must outlive the state.
TESSERA_API void add_optimizer(State& state, torch::optim::Optimizer& optimizer,
                               std::vector<PlacedTensor> parameters,
                               const std::string& prefix = "optimizer.");
/// The same for parameters, by name, that every rank holds.
TESSERA_API void add_optimizer(State& state, torch::optim::Optimizer& optimizer,
                               const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                               const std::string& prefix = "optimizer.");
/// The same for all parameters of a module that every rank holds.
TESSERA_API void add_optimizer(State& state, torch::optim::Optimizer& optimizer,
                               const torch::nn::Module& module,
                               const std::string& prefix = "optimizer.");

}  // namespace tessera::checkpoint
