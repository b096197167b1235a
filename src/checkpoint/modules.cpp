#include "tessera/checkpoint/modules.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>

#include "checkpoint/managed_ids.h"
#include "tessera/checkpoint/growing_tables.h"
#include "tessera/checkpoint/tables.h"
#include "tessera/core/check.h"
#include "tessera/embedding/embedding_bag_collection.h"
#include "tessera/embedding/embedding_collection.h"
#include "tessera/sharding/sharded_embedding_collection.h"
#include "tessera/sharding/sharded_feature_processed_collection.h"

namespace tessera::checkpoint {
namespace {

namespace optim = torch::optim;

// What an optimizer keeps per parameter: tensors by name, and a counter if it has one.
struct Slot {
  const char* name;
  std::function<at::Tensor&(optim::OptimizerParamState&)> tensor;
};

struct Kind {
  std::function<std::unique_ptr<optim::OptimizerParamState>()> make;
  std::vector<Slot> slots;
  std::function<std::int64_t&(optim::OptimizerParamState&)> step;  // empty: none
};

template <class ParamState>
ParamState& as(optim::OptimizerParamState& state) {
  return static_cast<ParamState&>(state);
}

template <class ParamState>
Kind adam_kind() {
  return {[] { return std::make_unique<ParamState>(); },
          {{"exp_avg", [](auto& s) -> at::Tensor& { return as<ParamState>(s).exp_avg(); }},
           {"exp_avg_sq", [](auto& s) -> at::Tensor& { return as<ParamState>(s).exp_avg_sq(); }},
           {"max_exp_avg_sq",
            [](auto& s) -> at::Tensor& { return as<ParamState>(s).max_exp_avg_sq(); }}},
          [](auto& s) -> std::int64_t& { return as<ParamState>(s).step(); }};
}

Kind kind_of(const optim::Optimizer& optimizer) {
  using optim::AdagradParamState;
  using optim::RMSpropParamState;
  using optim::SGDParamState;
  if (dynamic_cast<const optim::AdamW*>(&optimizer) != nullptr) {
    return adam_kind<optim::AdamWParamState>();
  }
  if (dynamic_cast<const optim::Adam*>(&optimizer) != nullptr) {
    return adam_kind<optim::AdamParamState>();
  }
  if (dynamic_cast<const optim::SGD*>(&optimizer) != nullptr) {
    return {[] { return std::make_unique<SGDParamState>(); },
            {{"momentum_buffer",
              [](auto& s) -> at::Tensor& { return as<SGDParamState>(s).momentum_buffer(); }}},
            nullptr};
  }
  if (dynamic_cast<const optim::Adagrad*>(&optimizer) != nullptr) {
    return {[] { return std::make_unique<AdagradParamState>(); },
            {{"sum", [](auto& s) -> at::Tensor& { return as<AdagradParamState>(s).sum(); }}},
            [](auto& s) -> std::int64_t& { return as<AdagradParamState>(s).step(); }};
  }
  if (dynamic_cast<const optim::RMSprop*>(&optimizer) != nullptr) {
    return {
        [] { return std::make_unique<RMSpropParamState>(); },
        {{"square_avg",
          [](auto& s) -> at::Tensor& { return as<RMSpropParamState>(s).square_avg(); }},
         {"momentum_buffer",
          [](auto& s) -> at::Tensor& { return as<RMSpropParamState>(s).momentum_buffer(); }},
         {"grad_avg", [](auto& s) -> at::Tensor& { return as<RMSpropParamState>(s).grad_avg(); }}},
        [](auto& s) -> std::int64_t& { return as<RMSpropParamState>(s).step(); }};
  }
  TESSERA_CHECK_TYPE(false,
                     "checkpoint: this optimizer is not known. Known are SGD, Adam, AdamW, Adagrad "
                     "and RMSprop; add the tensors of others by themselves.");
  return {};
}

PlacedTensor replicated(const std::string& name, const at::Tensor& tensor) {
  State state;
  state.add_replicated(name, tensor);
  return state.tensors()[0];
}

// Where a collection looks up if not in its own tables.
std::shared_ptr<torch::nn::Module> delegated_of(torch::nn::Module& module) {
  if (const auto* bags = dynamic_cast<embedding::EmbeddingBagCollection*>(&module)) {
    return bags->delegated();
  }
  if (const auto* rows = dynamic_cast<embedding::EmbeddingCollection*>(&module)) {
    return rows->delegated();
  }
  return nullptr;
}

// The tables of a feature-processed collection are those of its child.
bool is_tables(torch::nn::Module& module) {
  return dynamic_cast<sharding::ShardedTables*>(&module) != nullptr &&
         dynamic_cast<sharding::ShardedFeatureProcessedEmbeddingBagCollection*>(&module) == nullptr;
}

// The sharded tables that a module is, or that stand in for its own; null if there are none.
std::shared_ptr<sharding::ShardedTables> sharded_tables_of(
    const std::shared_ptr<torch::nn::Module>& module) {
  return std::dynamic_pointer_cast<sharding::ShardedTables>(
      is_tables(*module) ? module : delegated_of(*module));
}

bool is_sharded(torch::nn::Module& module) { return is_tables(module) || delegated_of(module); }

class TensorsState final : public Stateful {
 public:
  TensorsState(std::function<std::map<std::string, at::Tensor>()> source, std::string prefix)
      : source_(std::move(source)), prefix_(std::move(prefix)) {}

  void collect(std::vector<PlacedTensor>& tensors, Values&) override { add_all(tensors); }
  void prepare(const Reader&, std::vector<PlacedTensor>& tensors) override { add_all(tensors); }

 private:
  void add_all(std::vector<PlacedTensor>& tensors) {
    for (const auto& [name, tensor] : source_()) {
      tensors.push_back(replicated(prefix_ + name, tensor));
    }
  }

  std::function<std::map<std::string, at::Tensor>()> source_;
  std::string prefix_;
};

bool keeps_ids(torch::nn::Module& module) {
  return dynamic_cast<collision::MCHManagedCollisionModule*>(&module) != nullptr;
}

// All but the parts of sharded tables, which are placed by their plan, and the ids of tables.
std::map<std::string, at::Tensor> tensors_of(torch::nn::Module& module) {
  std::vector<std::string> sharded;
  std::vector<std::string> ids;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    if (is_sharded(*item.value())) sharded.push_back(item.key() + ".");
    if (keeps_ids(*item.value())) ids.push_back(item.key() + ".");
  }
  const auto is_in = [](const std::string& name, const std::vector<std::string>& paths) {
    return std::any_of(paths.begin(), paths.end(),
                       [&](const auto& path) { return name.rfind(path, 0) == 0; });
  };
  std::map<std::string, at::Tensor> tensors;
  if (is_sharded(module) || keeps_ids(module)) return tensors;
  for (const auto& item : module.named_parameters()) {
    if (!is_in(item.key(), sharded)) tensors[item.key()] = item.value();
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined() && !is_in(item.key(), ids)) tensors[item.key()] = item.value();
  }
  return tensors;
}

// Ids that are dealt over ranks are added by the collection that deals them.
void add_ids(State& state, torch::nn::Module& root, const std::string& prefix) {
  std::vector<const void*> dealt;
  for (const auto& item : root.named_modules()) {
    const std::string path = prefix + (item.key().empty() ? "" : item.key() + ".");
    if (auto sharded =
            std::dynamic_pointer_cast<collision::ShardedManagedCollisionCollection>(item.value())) {
      for (const auto& table : sharded->embedding_configs()) {
        dealt.push_back(sharded->part(table.name).get());
      }
      add_managed_ids(state, std::move(sharded), path);
      continue;
    }
    auto ids = std::dynamic_pointer_cast<collision::MCHManagedCollisionModule>(item.value());
    if (ids == nullptr || std::find(dealt.begin(), dealt.end(), ids.get()) != dealt.end()) continue;
    add_managed_ids(state, std::move(ids), path);
  }
}

// The tables of a collection, which binds its batch anew when its weights move.
template <class Collection>
class CollectionTables final : public TableSource {
 public:
  CollectionTables(std::shared_ptr<Collection> collection, std::string group)
      : collection_(std::move(collection)), group_(std::move(group)) {}

  std::vector<TableShard> shards() override { return now()->shards(); }
  Values values() override { return now()->values(); }
  void restore(const Values& values) override { now()->restore(values); }

 private:
  std::shared_ptr<TableSource> now() { return whole_tables(collection_->batch(), group_); }

  std::shared_ptr<Collection> collection_;
  std::string group_;
};

// The parts of sharded tables on this rank, with what steps them.
class ShardedSource final : public TableSource {
 public:
  ShardedSource(std::shared_ptr<sharding::ShardedTables> collection, std::string group)
      : collection_(std::move(collection)), group_(std::move(group)) {}

  std::vector<TableShard> shards() override {
    std::vector<TableShard> shards;
    for (const sharding::LocalShard& local : collection_->local_shards()) {
      TableShard shard;
      shard.name = name_of(local);
      shard.table_rows = local.table_rows;
      shard.table_columns = local.table_columns;
      shard.row = local.place.row;
      shard.column = local.place.column;
      shard.weight = local.weight;
      shard.is_replicated =
          collection_->plan().at(local.table).type == sharding::ShardingType::kDataParallel;
      if (const auto optimizer = optimizer_of(local)) add_state(shard, *optimizer, local.name);
      shards.push_back(std::move(shard));
    }
    return shards;
  }

  Values values() override {
    Values values;
    for (const sharding::LocalShard& local : collection_->local_shards()) {
      if (const auto optimizer = optimizer_of(local)) {
        values.merge(values_of(*optimizer, name_of(local)));
      }
    }
    return values;
  }

  void restore(const Values& values) override {
    for (const sharding::LocalShard& local : collection_->local_shards()) {
      if (const auto optimizer = optimizer_of(local)) {
        checkpoint::restore(*optimizer, name_of(local), values);
      }
    }
  }

 private:
  std::string name_of(const sharding::LocalShard& local) const {
    return group_ + local.table + ".weight";
  }

  // Null for a table that nobody of the collection steps.
  std::shared_ptr<embedding::RowOptimizer> optimizer_of(const sharding::LocalShard& local) const {
    for (const auto& optimizer : collection_->optimizers()) {
      if (optimizer->has_table(local.name)) return optimizer;
    }
    return nullptr;
  }

  std::shared_ptr<sharding::ShardedTables> collection_;
  std::string group_;
};

void add_sharded(State& state, const std::shared_ptr<torch::nn::Module>& module,
                 const std::string& path, const std::string& prefix,
                 const std::string& optimizer_prefix) {
  const auto tables = sharded_tables_of(module);
  if (!tables) return;
  if (auto growing = std::dynamic_pointer_cast<collision::GrowingTables>(tables)) {
    add_growing_tables(state, std::move(growing), prefix + path, optimizer_prefix + path);
    return;
  }
  const bool is_sequence =
      std::dynamic_pointer_cast<sharding::ShardedEmbeddingCollection>(tables) != nullptr;
  add_tables(state,
             std::make_shared<ShardedSource>(
                 tables, path + (is_sequence ? "embeddings." : "embedding_bags.")),
             prefix, optimizer_prefix);
}

template <class Collection>
void add_fused(State& state, const std::shared_ptr<torch::nn::Module>& module,
               const std::string& group, const std::string& optimizer_prefix) {
  const auto collection = std::dynamic_pointer_cast<Collection>(module);
  if (!collection || collection->delegated() || !collection->batch().optimizer()) return;
  add_tables(state, std::make_shared<CollectionTables<Collection>>(collection, group), std::nullopt,
             optimizer_prefix);
}

class OptimizerState final : public Stateful {
 public:
  OptimizerState(optim::Optimizer& optimizer, std::vector<PlacedTensor> parameters,
                 std::string prefix)
      : optimizer_(optimizer),
        kind_(kind_of(optimizer)),
        parameters_(std::move(parameters)),
        prefix_(std::move(prefix)) {}

  void collect(std::vector<PlacedTensor>& tensors, Values& values) override {
    for (const PlacedTensor& parameter : parameters_) {
      for (const Piece& piece : parameter.pieces) {
        auto* state = find(piece.tensor);
        if (state == nullptr) continue;
        if (kind_.step) values[step_name(parameter)] = kind_.step(*state);
      }
      for (const Slot& slot : kind_.slots) {
        PlacedTensor placed = placed_like(parameter, slot);
        for (const Piece& piece : parameter.pieces) {
          auto* state = find(piece.tensor);
          if (state == nullptr || !slot.tensor(*state).defined()) continue;
          placed.pieces.push_back({piece.offsets, slot.tensor(*state), piece.touched_rows});
        }
        if (!placed.pieces.empty()) tensors.push_back(std::move(placed));
      }
    }
    const auto& groups = optimizer_.param_groups();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      values[rate_name(i)] = groups[i].options().get_lr();
    }
  }

  void prepare(const Reader& source, std::vector<PlacedTensor>& tensors) override {
    const Values& values = source.manifest().values;
    prepared_.clear();
    for (const PlacedTensor& parameter : parameters_) {
      for (const Piece& piece : parameter.pieces) {
        auto* const kept = find(piece.tensor);
        bool is_used = values.contains(step_name(parameter));
        auto made = kind_.make();
        for (const Slot& slot : kind_.slots) {
          const std::string name = prefix_ + parameter.name + "." + slot.name;
          if (source.find(name) == nullptr) continue;
          is_used = true;
          const at::Tensor known = kept != nullptr ? slot.tensor(*kept) : at::Tensor();
          at::Tensor& target = slot.tensor(*made);
          target = known.defined() ? known : at::zeros_like(piece.tensor);
          PlacedTensor placed = placed_like(parameter, slot);
          placed.pieces.push_back({piece.offsets, target, {}});
          placed.is_replicated = false;  // each piece by itself
          tensors.push_back(std::move(placed));
        }
        if (!is_used) made.reset();
        prepared_.emplace_back(piece.tensor.unsafeGetTensorImpl(), std::move(made));
      }
    }
  }

  void finish(const Values& values) override {
    for (auto& [parameter, made] : prepared_) {
      if (made) {
        optimizer_.state()[parameter] = std::move(made);
      } else {
        optimizer_.state().erase(parameter);
      }
    }
    prepared_.clear();
    for (const PlacedTensor& parameter : parameters_) {
      const auto step = values.find(step_name(parameter));
      if (step == values.end() || !kind_.step) continue;
      for (const Piece& piece : parameter.pieces) {
        if (auto* state = find(piece.tensor))
          kind_.step(*state) = std::get<std::int64_t>(step->second);
      }
    }
    auto& groups = optimizer_.param_groups();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const auto rate = values.find(rate_name(i));
      if (rate != values.end()) groups[i].options().set_lr(std::get<double>(rate->second));
    }
  }

 private:
  optim::OptimizerParamState* find(const at::Tensor& parameter) {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    return found == optimizer_.state().end() ? nullptr : found->second.get();
  }
  PlacedTensor placed_like(const PlacedTensor& parameter, const Slot& slot) const {
    PlacedTensor placed;
    placed.name = prefix_ + parameter.name + "." + slot.name;
    placed.shape = parameter.shape;
    placed.is_replicated = parameter.is_replicated;
    placed.owner = parameter.owner;
    return placed;
  }
  std::string step_name(const PlacedTensor& parameter) const {
    return prefix_ + parameter.name + ".step";
  }
  std::string rate_name(std::size_t group) const {
    return prefix_ + "group." + std::to_string(group) + ".lr";
  }

  optim::Optimizer& optimizer_;
  Kind kind_;
  std::vector<PlacedTensor> parameters_;
  std::string prefix_;
  // What the optimizer gets when a load is done; none: nothing, as the one that was saved.
  std::vector<std::pair<void*, std::unique_ptr<optim::OptimizerParamState>>> prepared_;
};

}  // namespace

void add_module(State& state, const std::shared_ptr<torch::nn::Module>& module,
                const std::string& prefix, const std::string& optimizer_prefix) {
  TESSERA_CHECK_VALUE(module != nullptr, "checkpoint: there is no module to save.");
  add_tensors(state, [module] { return tensors_of(*module); }, prefix);
  add_ids(state, *module, prefix);
  for (const auto& item : module->named_modules()) {
    const std::string path = item.key().empty() ? "" : item.key() + ".";
    add_fused<embedding::EmbeddingBagCollection>(state, item.value(), path + "embedding_bags.",
                                                 optimizer_prefix);
    add_sharded(state, item.value(), path, prefix, optimizer_prefix);
    add_fused<embedding::EmbeddingCollection>(state, item.value(), path + "embeddings.",
                                              optimizer_prefix);
  }
}

void add_tensors(State& state, std::function<std::map<std::string, at::Tensor>()> tensors,
                 const std::string& prefix) {
  state.add(std::make_shared<TensorsState>(std::move(tensors), prefix));
}

void add_optimizer(State& state, torch::optim::Optimizer& optimizer,
                   std::vector<PlacedTensor> parameters, const std::string& prefix) {
  state.add(std::make_shared<OptimizerState>(optimizer, std::move(parameters), prefix));
}

void add_optimizer(State& state, torch::optim::Optimizer& optimizer,
                   const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                   const std::string& prefix) {
  std::vector<PlacedTensor> placed;
  for (const auto& [name, tensor] : parameters) placed.push_back(replicated(name, tensor));
  add_optimizer(state, optimizer, std::move(placed), prefix);
}

void add_optimizer(State& state, torch::optim::Optimizer& optimizer,
                   const torch::nn::Module& module, const std::string& prefix) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const auto& item : module.named_parameters()) {
    parameters.emplace_back(item.key(), item.value());
  }
  add_optimizer(state, optimizer, parameters, prefix);
}

}  // namespace tessera::checkpoint
