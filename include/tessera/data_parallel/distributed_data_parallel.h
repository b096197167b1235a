// tessera/data_parallel/distributed_data_parallel.h — every rank holds the model and sees other
// samples; gradients are averaged while backward runs.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/comm/group.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/export.h"
#include "tessera/data_parallel/join.h"
#include "tessera/data_parallel/mixed_precision.h"
#include "tessera/data_parallel/model_parts.h"
#include "tessera/data_parallel/options.h"
#include "tessera/data_parallel/outputs.h"
#include "tessera/data_parallel/replica.h"

namespace tessera::data_parallel {

/// Which ranks of a mesh share a model, and how their gradients combine.
struct MeshAxes {
  /// Axes whose ranks see different samples: gradients are averaged over them.
  std::vector<std::string> average = {"data"};
  /// Axes whose ranks each hold a part of the same sample's work (graph, vocab): gradients add up.
  std::vector<std::string> sum;
};

/// The group of a model that is the same on all ranks along `axes`. Collective over the mesh.
TESSERA_API comm::Group replica_group(const comm::Mesh& mesh, const MeshAxes& axes);
/// `options` with the divisor that `axes` mean.
TESSERA_API Options replica_options(const comm::Mesh& mesh, const MeshAxes& axes, Options options);

/// A module whose parameters stay equal on all ranks of a group.
///
/// Calling it runs the module's forward, whatever its arguments and return type (see outputs.h);
/// backward then averages the gradients over the ranks. All ranks call forward and backward equally
/// often; see NoSync and join for exceptions.
template <class Module>
class DistributedDataParallel {
 public:
  /// Collective; see Replica.
  DistributedDataParallel(std::shared_ptr<Module> module, const comm::Group& group,
                          Options options = {})
      : module_(std::move(module)), replica_(parts_of(module_), group, std::move(options)) {}
  DistributedDataParallel(torch::nn::ModuleHolder<Module> module, const comm::Group& group,
                          Options options = {})
      : DistributedDataParallel(module.ptr(), group, std::move(options)) {}
  /// For a model that is the same along some axes of a mesh. Collective over the mesh.
  DistributedDataParallel(std::shared_ptr<Module> module, const comm::Mesh& mesh,
                          const MeshAxes& axes = {}, Options options = {})
      : DistributedDataParallel(std::move(module), replica_group(mesh, axes),
                                replica_options(mesh, axes, std::move(options))) {}

  /// Computes in `precision.param_dtype` and reduces in `precision.reduce_dtype`; see
  /// mixed_precision.h. Optimizers take `parameters()`.
  DistributedDataParallel(std::shared_ptr<Module> module, const comm::Group& group, Options options,
                          const MixedPrecisionOptions& precision)
      : module_(std::move(module)),
        precision_(std::make_unique<MixedPrecision>(parts_of(module_), precision)),
        replica_(precision_->parts(), group, std::move(options)) {
    if (precision.reduce_dtype) replica_.register_comm_hook(precision_->hook());
  }

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    replica_.before_forward();
    if constexpr (std::is_void_v<decltype(run(std::forward<Arguments>(arguments)...))>) {
      run(std::forward<Arguments>(arguments)...);
      replica_.after_forward({});
    } else {
      auto result = run(std::forward<Arguments>(arguments)...);
      std::vector<at::Tensor> outputs;
      for_each_tensor(result, [&](at::Tensor& tensor) { outputs.push_back(tensor); });
      outputs = replica_.after_forward(std::move(outputs));
      std::size_t next = 0;
      for_each_tensor(result, [&](at::Tensor& tensor) { tensor = outputs[next++]; });
      return result;
    }
  }

  /// The wrapped module: for evaluation on one rank, saving, and its own methods.
  const std::shared_ptr<Module>& module() const noexcept { return module_; }
  Replica& replica() noexcept { return replica_; }
  const comm::Group& group() const noexcept { return replica_.group(); }
  /// What an optimizer steps: the module's parameters, in full precision.
  std::vector<at::Tensor> parameters() const {
    return precision_ ? precision_->parameters() : module_->parameters();
  }

  /// Makes buffers equal to rank 0's, before all ranks evaluate. Collective.
  void sync_buffers() { replica_.sync_buffers(); }
  [[nodiscard]] NoSync no_sync() { return NoSync(replica_); }
  /// Runs `body` on ranks that may have different numbers of batches; see join.h.
  void join(const std::function<void()>& body, const JoinOptions& options = {}) {
    data_parallel::join({&replica_}, body, options);
  }
  void register_comm_hook(std::shared_ptr<CommHook> hook) {
    replica_.register_comm_hook(std::move(hook));
  }

  /// Parameters and buffers by name, each name behind `prefix`; torch writes "module.". Detached,
  /// sharing memory. Not collective.
  std::map<std::string, at::Tensor> state_dict(const std::string& prefix = "") const {
    if (precision_) precision_->give_back();
    return state_of(*module_, prefix);
  }
  /// Copies values in. Names may carry the prefix "module." or not. Throws ValueError naming what
  /// is missing, unknown, or has another shape. Not collective.
  void load_state_dict(const std::map<std::string, at::Tensor>& state) {
    if (precision_) precision_->give_back();
    load_state(*module_, state);
  }

  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }

 private:
  template <class... Arguments>
  auto run(Arguments&&... arguments) {
    // A forward that takes its inputs by reference cannot be given rounded copies.
    if constexpr (requires { module_->forward(rounded(std::forward<Arguments>(arguments))...); }) {
      if (precision_) {
        precision_->before_forward();
        return module_->forward(rounded(std::forward<Arguments>(arguments))...);
      }
    } else {
      if (precision_) precision_->before_forward();
    }
    return module_->forward(std::forward<Arguments>(arguments)...);
  }

  template <class Argument>
  auto rounded(Argument&& argument) const {
    if constexpr (std::is_same_v<std::decay_t<Argument>, at::Tensor>) {
      return precision_->cast_input(argument);
    } else {
      return std::forward<Argument>(argument);
    }
  }

  std::shared_ptr<Module> module_;
  std::unique_ptr<MixedPrecision> precision_;
  Replica replica_;
};

template <class Module>
DistributedDataParallel(torch::nn::ModuleHolder<Module>, const comm::Group&)
    -> DistributedDataParallel<Module>;
template <class Module>
DistributedDataParallel(torch::nn::ModuleHolder<Module>, const comm::Group&, Options)
    -> DistributedDataParallel<Module>;

}  // namespace tessera::data_parallel
