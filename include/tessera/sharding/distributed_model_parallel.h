// tessera/sharding/distributed_model_parallel.h — a whole model over ranks: its tables sharded, the
// rest replicated.
//
// The collections in the model keep their place and their type; what changes is where they look up.
// So a model is written and tested for one process, and then given to DistributedModelParallel.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/data_parallel/join.h"
#include "tessera/data_parallel/outputs.h"
#include "tessera/data_parallel/replica.h"
#include "tessera/sharding/sharded_embedding_collection.h"

namespace tessera::sharding {

struct ModelParallelOptions {
  ShardedSequenceOptions tables = {};
  /// Of what is replicated. Shards are left alone without being named.
  data_parallel::Options dense = {};
};

/// Everything of DistributedModelParallel that does not depend on the type of the module.
class TESSERA_API ModelParallelParts final : public data_parallel::Joinable {
 public:
  ModelParallelParts(const std::shared_ptr<torch::nn::Module>& module, const ShardingPlan& plan,
                     const comm::Group& group, const ModelParallelOptions& options);
  /// As `other` is made, for a module like its module; takes all its values. Collective.
  ModelParallelParts(const std::shared_ptr<torch::nn::Module>& module,
                     const ModelParallelParts& other);
  ~ModelParallelParts() override;
  ModelParallelParts(const ModelParallelParts&) = delete;
  ModelParallelParts& operator=(const ModelParallelParts&) = delete;

  void before_forward();
  std::vector<at::Tensor> after_forward(std::vector<at::Tensor> outputs);

  std::unique_ptr<data_parallel::JoinHook> join_hook(
      const data_parallel::JoinOptions& options) override;
  comm::Group join_group() const override;

  struct State;
  State& state() const noexcept { return *state_; }

 private:
  std::shared_ptr<State> state_;
};

/// Backwards of forwards made in this scope leave gradients local or add up in row-sparse ones.
class TESSERA_API Accumulation {
 public:
  explicit Accumulation(ModelParallelParts& parts);
  ~Accumulation();
  Accumulation(const Accumulation&) = delete;
  Accumulation& operator=(const Accumulation&) = delete;

 private:
  ModelParallelParts& parts_;
  std::unique_ptr<data_parallel::NoSync> dense_;
  std::vector<bool> were_kept_;
};

/// A model whose EmbeddingBagCollections, also feature-processed ones, and EmbeddingCollections are
/// sharded as a plan says and whose other parameters are replicated and averaged.
///
/// Collective over the group: construction, forward and backward, and what says so. With fused
/// tables (the default) backward steps the rows and an optimizer steps `dense_parameters()`.
template <class Module>
class DistributedModelParallel {
 public:
  /// Shards every collection that `plan` names by its path in the module ("" for the module
  /// itself). Tables that have memory keep their rows; those on the meta device get new ones, as
  /// their configs say. Collections that the plan does not name are replicated with the rest.
  ///
  /// Throws ValueError for a path that is no collection, for a plan that does not fit its tables,
  /// and for a parameter on the meta device that is not of a sharded table.
  DistributedModelParallel(std::shared_ptr<Module> module, const ShardingPlan& plan,
                           const comm::Group& group, const ModelParallelOptions& options = {})
      : module_(std::move(module)),
        parts_(std::make_unique<ModelParallelParts>(module_, plan, group, options)) {}

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    parts_->before_forward();
    auto result = module_->forward(std::forward<Arguments>(arguments)...);
    std::vector<at::Tensor> outputs;
    data_parallel::for_each_tensor(result, [&](at::Tensor& tensor) { outputs.push_back(tensor); });
    outputs = parts_->after_forward(std::move(outputs));
    std::size_t next = 0;
    data_parallel::for_each_tensor(result, [&](at::Tensor& tensor) { tensor = outputs[next++]; });
    return result;
  }

  /// Shards `module`, which is as this one's was before, in the same way, and gives it all values:
  /// parameters, buffers, rows, and the state of what steps the rows. From then on the two are
  /// independent. Collective; throws ValueError for a module with other parameters.
  DistributedModelParallel copy(std::shared_ptr<Module> module) const {
    auto parts = std::make_unique<ModelParallelParts>(module, *parts_);
    return DistributedModelParallel(std::move(module), std::move(parts));
  }

  const std::shared_ptr<Module>& module() const noexcept { return module_; }
  ModelParallelParts& parts() noexcept { return *parts_; }
  /// Runs `body` on ranks that may have different numbers of batches: a rank that has run out takes
  /// part with empty batches. Gradients are divided by the number of all ranks.
  void join(const std::function<void()>& body, const data_parallel::JoinOptions& options = {}) {
    data_parallel::join({parts_.get()}, body, options);
  }
  /// Scope in which gradients add up. Throws ValueError if backward steps the tables: ask for
  /// GradientForm::kSparse then.
  [[nodiscard]] Accumulation no_sync() { return Accumulation(*parts_); }

 private:
  DistributedModelParallel(std::shared_ptr<Module> module,
                           std::unique_ptr<ModelParallelParts> parts)
      : module_(std::move(module)), parts_(std::move(parts)) {}

  std::shared_ptr<Module> module_;
  std::unique_ptr<ModelParallelParts> parts_;
};

/// The plan as it was carried out.
TESSERA_API const ShardingPlan& plan_of(const ModelParallelParts& parts);
/// The sharded collections by path, in order of the paths.
TESSERA_API std::vector<std::pair<std::string, std::shared_ptr<ShardedTables>>> sharded_modules_of(
    const ModelParallelParts& parts);
/// What an optimizer of LibTorch steps: all parameters but those of sharded tables.
TESSERA_API std::vector<at::Tensor> dense_parameters_of(const ModelParallelParts& parts);
/// With GradientForm::kSparse: steps the rows from the gradients of all passes since the last.
/// Collective.
TESSERA_API void step_tables(ModelParallelParts& parts);
/// Drops all gradients, of tables and of the rest.
TESSERA_API void zero_grad(ModelParallelParts& parts);
TESSERA_API void set_tables_learning_rate(ModelParallelParts& parts, double learning_rate);
/// The norm over the gradients of the dense parameters and of all shards of all ranks; if it is
/// greater than `max_norm`, all are scaled so that it becomes `max_norm`. The result of one
/// process. Collective. Throws ValueError if backward steps the tables.
TESSERA_API double clip_grad_norm(ModelParallelParts& parts, double max_norm);
/// Whole tables and dense tensors by name, as the module had them before. Collective.
TESSERA_API std::map<std::string, at::Tensor> state_dict_of(const ModelParallelParts& parts);
/// Takes whole tensors; every rank cuts out its own parts. Throws ValueError naming what is
/// missing, unknown or of another shape, before anything is changed. Not collective.
TESSERA_API void load_state_dict(ModelParallelParts& parts,
                                 const std::map<std::string, at::Tensor>& state);

}  // namespace tessera::sharding
