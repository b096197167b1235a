// tessera/checkpoint/modules.h — modules and optimizers of LibTorch as parts of a State.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/checkpoint/state.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

/// Adds the parameters and buffers of a module that every rank holds whole, as in data parallelism.
/// Names are `prefix` and the module's own.
TESSERA_API void add_module(State& state, const std::shared_ptr<torch::nn::Module>& module,
                            const std::string& prefix = "model.");

/// Adds the state of an optimizer of these parameters: `prefix`, the parameter's name, and the
/// optimizer's ("exp_avg"); each lies where its parameter lies. Step counters and learning rates
/// are values. SGD, Adam, AdamW, Adagrad and RMSprop; throws TypeError for others. The optimizer
/// must outlive the state.
TESSERA_API void add_optimizer(State& state, torch::optim::Optimizer& optimizer,
                               std::vector<PlacedTensor> parameters,
                               const std::string& prefix = "optimizer.");
/// The same for all parameters of a module that every rank holds.
TESSERA_API void add_optimizer(State& state, torch::optim::Optimizer& optimizer,
                               const torch::nn::Module& module,
                               const std::string& prefix = "optimizer.");

}  // namespace tessera::checkpoint
