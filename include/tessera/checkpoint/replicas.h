// tessera/checkpoint/replicas.h — models under DistributedDataParallel as parts of a State.

#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/modules.h"
#include "tessera/checkpoint/state.h"
#include "tessera/core/export.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/distributed_data_parallel.h"

namespace tessera::checkpoint {

/// Adds what a communication hook keeps: error feedback, factors, and the state of an optimizer
/// that runs in backward. Names are `prefix` and the hook's own, which name parameters, so neither
/// the buckets nor the number of ranks matter.
///
/// What differs from rank to rank (error feedback) is saved per rank. With another number of ranks,
/// the losses of rank r go to rank r modulo the new number, scaled so that none is lost from the
/// average.
TESSERA_API void add_hook(State& state, std::shared_ptr<data_parallel::CommHook> hook, int rank,
                          int size, const std::string& prefix = "hook.");

/// The same for the hook that `replica` has at the time of a save or load, if it has one. The
/// replica must outlive the state.
TESSERA_API void add_hook(State& state, data_parallel::Replica& replica,
                          const std::string& prefix = "hook.");

/// Adds the module's parameters (in full precision), its buffers and the hook's state. The model
/// must outlive the state.
template <class Module>
void add_module(State& state, data_parallel::DistributedDataParallel<Module>& model,
                const std::string& prefix = "model.", const std::string& hook_prefix = "hook.") {
  add_tensors(state, [&model] { return model.state_dict(); }, prefix);
  add_hook(state, model.replica(), hook_prefix);
}

/// Adds the state of an optimizer of `model.parameters()`; see modules.h.
template <class Module>
void add_optimizer(State& state, torch::optim::Optimizer& optimizer,
                   data_parallel::DistributedDataParallel<Module>& model,
                   const std::string& prefix = "optimizer.") {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const auto& item : model.module()->named_parameters()) {
    parameters.emplace_back(item.key(), item.value());
    for (const auto& parameter : model.replica().parameters()) {
      if (parameter.name == item.key()) parameters.back().second = parameter.tensor;
    }
  }
  add_optimizer(state, optimizer, parameters, prefix);
}

}  // namespace tessera::checkpoint
