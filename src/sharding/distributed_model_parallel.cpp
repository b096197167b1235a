#include "tessera/sharding/distributed_model_parallel.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <numeric>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "tessera/core/check.h"
#include "tessera/data_parallel/model_parts.h"
#include "tessera/embedding/embedding_bag_collection.h"
#include "tessera/embedding/embedding_collection.h"
#include "tessera/embedding/feature_processed_collection.h"
#include "tessera/sharding/sharded_feature_processed_collection.h"

namespace tessera::sharding {

using embedding::EmbeddingBagCollection;
using embedding::EmbeddingCollection;
using embedding::FeatureProcessedEmbeddingBagCollection;
using jagged::KeyedJaggedTensor;

namespace {

constexpr const char* kModelParallel = "sharding.distributed_model_parallel";

std::map<std::string, at::Tensor> weights_of(const auto& collection, const auto& configs) {
  std::map<std::string, at::Tensor> weights;
  for (const auto& config : configs) {
    const at::Tensor weight = collection.weight(config.name);
    if (!weight.is_meta()) weights[config.name] = weight;
  }
  return weights;
}

ShardedEmbeddingBagCollection& bags_of(ShardedEmbeddingBagCollection& tables) { return tables; }
// A rank that shadows must not touch the processor: its gradients are answered with the buckets.
ShardedEmbeddingBagCollection& bags_of(ShardedFeatureProcessedEmbeddingBagCollection& tables) {
  return *tables.bags();
}

/// A sharded collection in its place in the model.
struct Sharded {
  std::string path;
  std::string holder;  // of the tables in the collection's names
  std::shared_ptr<ShardedTables> tables;
  std::vector<embedding::EmbeddingTableConfig> configs;
  bool is_weighted = false;
  at::ScalarType ids_type = at::kLong;  // of the last batch
  bool wants_weight_gradient = false;
  /// Sums what comes of a batch, for backward.
  std::function<at::Tensor(const KeyedJaggedTensor&)> shadow;

  std::string weight_name(const std::string& table) const {
    return (path.empty() ? "" : path + ".") + holder + "." + table + ".weight";
  }
  KeyedJaggedTensor empty_batch() const;
};

KeyedJaggedTensor Sharded::empty_batch() const {
  std::vector<std::string> keys;
  for (const auto& config : configs) {
    for (const auto& feature : config.features()) {
      if (std::find(keys.begin(), keys.end(), feature) == keys.end()) keys.push_back(feature);
    }
  }
  jagged::KeyedJaggedFields fields;
  fields.lengths = at::zeros({0}, at::kInt);
  fields.stride = 0;
  if (is_weighted) {
    fields.weights = at::empty({0}, at::kFloat).requires_grad_(wants_weight_gradient);
  }
  return KeyedJaggedTensor(keys, at::empty({0}, ids_type), fields);
}

}  // namespace

struct ModelParallelParts::State : std::enable_shared_from_this<State> {
  State(const std::shared_ptr<torch::nn::Module>& own, const ShardingPlan& given,
        const comm::Group& own_group, const ModelParallelOptions& own_options)
      : module(own), plan(given), group(own_group), options(own_options) {}

  void shard();
  template <class Collection, class Tables>
  void replace(const std::string& path, Collection& collection, std::shared_ptr<Tables> tables,
               const char* holder);
  void replicate();
  void note_call(Sharded& sharded, const KeyedJaggedTensor& features);
  void shadow_tables();
  void check_not_fused(const char* what) const;

  std::shared_ptr<torch::nn::Module> module;
  ShardingPlan plan;
  comm::Group group;
  ModelParallelOptions options;
  std::vector<std::shared_ptr<Sharded>> sharded;
  std::vector<std::string> shard_names;             // of parameters
  std::unique_ptr<data_parallel::Replica> replica;  // null if nothing is left to replicate
  /// The order in which the last iteration used the collections.
  std::vector<Sharded*> calls;
  std::vector<Sharded*> last_calls;
};

using State = ModelParallelParts::State;

void State::note_call(Sharded& own, const KeyedJaggedTensor& features) {
  calls.push_back(&own);
  own.ids_type = features.values().scalar_type();
  own.wants_weight_gradient = own.is_weighted && at::GradMode::is_enabled() &&
                              features.weights_or_none().defined() &&
                              features.weights_or_none().requires_grad();
}

template <class Collection, class Tables>
void State::replace(const std::string& path, Collection& collection, std::shared_ptr<Tables> tables,
                    const char* holder) {
  auto own = std::make_shared<Sharded>();
  own->path = path;
  own->holder = holder;
  own->tables = tables;
  if constexpr (std::is_same_v<Collection, EmbeddingCollection>) {
    own->configs = collection.embedding_configs();
    own->shadow = [tables](const KeyedJaggedTensor& features) {
      at::Tensor sum = at::zeros({});
      for (const auto& [name, rows] : tables->forward(features)) sum = sum + rows.values().sum();
      return sum;
    };
  } else {
    own->configs = collection.embedding_bag_configs();
    own->is_weighted = collection.is_weighted();
    own->shadow = [tables](const KeyedJaggedTensor& features) {
      return bags_of(*tables).forward(features).values().sum();
    };
  }
  const auto weights = weights_of(collection, own->configs);
  if (!weights.empty()) {
    TESSERA_CHECK_VALUE(weights.size() == own->configs.size(), kModelParallel, ": of '", path,
                        "' some tables are on the meta device and some are not.");
    tables->load_tables(weights);
  }
  // The module may outlive this, and this holds the module.
  const std::weak_ptr<State> self = weak_from_this();
  collection.delegate(tables, [self, own, tables](const KeyedJaggedTensor& features) {
    if (const auto state = self.lock()) state->note_call(*own, features);
    return tables->forward(features);
  });
  for (const auto& parameter : tables->named_parameters()) {
    if (parameter.key().rfind(std::string(holder) + ".", 0) != 0) continue;  // a processor's
    const bool is_dense =
        std::any_of(own->configs.begin(), own->configs.end(), [&](const auto& config) {
          const auto& how = tables->plan().at(config.name);
          return how.type == ShardingType::kDataParallel && how.kernel == ComputeKernel::kDense &&
                 parameter.key() == std::string(holder) + "." + config.name + ".weight";
        });
    // Dense data-parallel tables are averaged with the rest.
    if (!is_dense) {
      shard_names.push_back((path.empty() ? "" : path + ".") + parameter.key());
    }
  }
  sharded.push_back(std::move(own));
}

void State::shard() {
  std::map<std::string, std::shared_ptr<torch::nn::Module>> found;
  found[""] = module;
  for (const auto& child : module->named_modules("", /*include_self=*/false)) {
    found[child.key()] = child.value();
  }
  for (const auto& [path, module_plan] : plan.modules) {
    const auto place = found.find(path);
    TESSERA_CHECK_VALUE(place != found.end(), kModelParallel, ": the plan names '", path,
                        "', which is no part of the model.");
    if (auto* bags = dynamic_cast<EmbeddingBagCollection*>(place->second.get())) {
      replace(path, *bags,
              std::make_shared<ShardedEmbeddingBagCollection>(bags->embedding_bag_configs(),
                                                              module_plan, group,
                                                              bags->is_weighted(), options.tables),
              "embedding_bags");
    } else if (auto* processed =
                   dynamic_cast<FeatureProcessedEmbeddingBagCollection*>(place->second.get())) {
      replace(path, *processed,
              std::make_shared<ShardedFeatureProcessedEmbeddingBagCollection>(
                  processed->embedding_bag_configs(), processed->processor(), module_plan, group,
                  options.tables),
              "_embedding_bag_collection.embedding_bags");
    } else if (auto* rows = dynamic_cast<EmbeddingCollection*>(place->second.get())) {
      ShardedSequenceOptions own = options.tables;
      own.need_indices = rows->need_indices();
      replace(path, *rows,
              std::make_shared<ShardedEmbeddingCollection>(rows->embedding_configs(), module_plan,
                                                           group, own),
              "embeddings");
    } else {
      TESSERA_CHECK_VALUE(false, kModelParallel, ": the plan names '", path, "', which is a ",
                          place->second->name(), " and no collection of tables.");
    }
  }
}

void State::replicate() {
  bool has_dense = false;
  for (const auto& parameter : module->named_parameters()) {
    const bool is_shard =
        std::find(shard_names.begin(), shard_names.end(), parameter.key()) != shard_names.end();
    TESSERA_CHECK_VALUE(is_shard || !parameter.value().is_meta(), kModelParallel, ": parameter '",
                        parameter.key(),
                        "' is on the meta device. Give it memory, or let the plan name its "
                        "collection.");
    has_dense |= !is_shard && parameter.value().requires_grad();
  }
  if (!has_dense) return;
  std::vector<int> ranks(static_cast<std::size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  // A group of its own: a rank that shadows answers tables and buckets in any order.
  const auto dense = group.subgroup(ranks, group.name() + "/dense");
  data_parallel::Options own = options.dense;
  own.ignored.insert(own.ignored.end(), shard_names.begin(), shard_names.end());
  replica = std::make_unique<data_parallel::Replica>(data_parallel::parts_of(module), *dense, own);
}

void State::shadow_tables() {
  const auto& order = last_calls;
  const at::AutoGradMode recorded(true);
  at::Tensor sum = at::zeros({}).requires_grad_(true);
  if (order.empty()) {
    for (const auto& each : sharded) sum = sum + each->shadow(each->empty_batch());
  }
  for (Sharded* each : order) sum = sum + each->shadow(each->empty_batch());
  sum.backward();
}

void State::check_not_fused(const char* what) const {
  TESSERA_CHECK_VALUE(
      sharded.empty() || options.tables.gradients != embedding::GradientForm::kFused,
      kModelParallel, ": ", what,
      " needs the gradients of the tables, but backward steps their rows. Ask for "
      "GradientForm::kSparse, and call step_tables.");
}

ModelParallelParts::ModelParallelParts(const std::shared_ptr<torch::nn::Module>& module,
                                       const ShardingPlan& plan, const comm::Group& group,
                                       const ModelParallelOptions& options)
    : state_(std::make_shared<State>(module, plan, group, options)) {
  state_->shard();
  state_->replicate();
}

namespace {

void copy_optimizers(const ShardedTables& from, ShardedTables& to) {
  const auto given = from.optimizers();
  const auto own = to.optimizers();
  for (std::size_t i = 0; i < own.size(); ++i) {
    own[i]->load_state_dict(given[i]->state_dict());
    own[i]->set_learning_rate(given[i]->options().learning_rate);
  }
}

}  // namespace

ModelParallelParts::ModelParallelParts(const std::shared_ptr<torch::nn::Module>& module,
                                       const ModelParallelParts& other)
    : ModelParallelParts(module, other.state_->plan, other.state_->group, other.state_->options) {
  // Shards lie alike on both sides; every rank copies its own.
  data_parallel::load_state(*module, data_parallel::state_of(*other.state_->module));
  for (std::size_t i = 0; i < state_->sharded.size(); ++i) {
    copy_optimizers(*other.state_->sharded[i]->tables, *state_->sharded[i]->tables);
  }
}

ModelParallelParts::~ModelParallelParts() = default;

void ModelParallelParts::before_forward() {
  if (!state_->calls.empty()) state_->last_calls = std::move(state_->calls);
  state_->calls.clear();
  const data_parallel::JoinOptions* join = join_options();
  if (join != nullptr) notify_join_context();
  if (state_->replica == nullptr) return;
  if (join != nullptr) {
    state_->replica->before_forward_joined(*join);
  } else {
    state_->replica->before_forward();
  }
}

std::vector<at::Tensor> ModelParallelParts::after_forward(std::vector<at::Tensor> outputs) {
  return state_->replica == nullptr ? outputs : state_->replica->after_forward(std::move(outputs));
}

namespace {

class ModelJoinHook final : public data_parallel::JoinHook {
 public:
  ModelJoinHook(std::shared_ptr<State> state, data_parallel::JoinOptions options)
      : state_(std::move(state)), options_(options) {
    if (!state_->calls.empty()) state_->last_calls = std::move(state_->calls);
    state_->calls.clear();
  }

  // Active ranks reduce buckets before, between and after the exchanges of the tables; answering
  // both at once fits every order.
  void main_hook() override {
    std::exception_ptr failure;
    std::thread dense([&] {
      try {
        if (state_->replica != nullptr) state_->replica->shadow_iteration(options_);
      } catch (...) {
        failure = std::current_exception();
      }
    });
    try {
      state_->shadow_tables();
    } catch (...) {
      dense.join();
      throw;
    }
    dense.join();
    if (failure) std::rethrow_exception(failure);
  }

  void post_hook(bool is_last_joiner) override {
    if (state_->replica != nullptr) state_->replica->finish_join(is_last_joiner);
  }

 private:
  std::shared_ptr<State> state_;
  data_parallel::JoinOptions options_;
};

}  // namespace

std::unique_ptr<data_parallel::JoinHook> ModelParallelParts::join_hook(
    const data_parallel::JoinOptions& options) {
  TESSERA_CHECK_VALUE(options.divide_by_initial_world_size || state_->sharded.empty(),
                      kModelParallel,
                      ": gradients of sharded tables are divided by the number of all ranks; "
                      "join with divide_by_initial_world_size.");
  return std::make_unique<ModelJoinHook>(state_, options);
}

comm::Group ModelParallelParts::join_group() const { return state_->group; }

Accumulation::Accumulation(ModelParallelParts& parts) : parts_(parts) {
  parts.state().check_not_fused("no_sync");
  if (parts.state().replica != nullptr) {
    dense_ = std::make_unique<data_parallel::NoSync>(*parts.state().replica);
  }
  for (const auto& each : parts.state().sharded) {
    were_kept_.push_back(each->tables->keep_local_gradients(true));
  }
}

Accumulation::~Accumulation() {
  const auto& sharded = parts_.state().sharded;
  for (std::size_t i = 0; i < were_kept_.size(); ++i) {
    sharded[i]->tables->keep_local_gradients(were_kept_[i]);
  }
}

const ShardingPlan& plan_of(const ModelParallelParts& parts) { return parts.state().plan; }

std::vector<std::pair<std::string, std::shared_ptr<ShardedTables>>> sharded_modules_of(
    const ModelParallelParts& parts) {
  std::vector<std::pair<std::string, std::shared_ptr<ShardedTables>>> modules;
  for (const auto& each : parts.state().sharded) modules.emplace_back(each->path, each->tables);
  return modules;
}

std::vector<at::Tensor> dense_parameters_of(const ModelParallelParts& parts) {
  const State& state = parts.state();
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : state.module->named_parameters()) {
    if (std::find(state.shard_names.begin(), state.shard_names.end(), parameter.key()) ==
        state.shard_names.end()) {
      parameters.push_back(parameter.value());
    }
  }
  return parameters;
}

void step_tables(ModelParallelParts& parts) {
  for (const auto& each : parts.state().sharded) each->tables->step();
}

void zero_grad(ModelParallelParts& parts) {
  for (at::Tensor& parameter : dense_parameters_of(parts)) parameter.mutable_grad() = at::Tensor();
  for (const auto& each : parts.state().sharded) each->tables->zero_grad_rows();
}

void set_tables_learning_rate(ModelParallelParts& parts, double learning_rate) {
  for (const auto& each : parts.state().sharded) each->tables->set_learning_rate(learning_rate);
}

double clip_grad_norm(ModelParallelParts& parts, double max_norm) {
  State& state = parts.state();
  state.check_not_fused("clip_grad_norm");
  TESSERA_CHECK_VALUE(max_norm > 0, kModelParallel, ": max_norm is ", max_norm,
                      ", it must be greater than 0.");
  const at::NoGradGuard no_grad;
  double square = 0;
  std::vector<at::Tensor> dense;
  for (const at::Tensor& parameter : dense_parameters_of(parts)) {
    if (!parameter.grad().defined()) continue;
    dense.push_back(parameter.grad());
    square += std::pow(at::linalg_vector_norm(parameter.grad().to(at::kDouble)).item<double>(), 2);
  }
  std::vector<double> norms;
  for (const auto& each : state.sharded) {
    norms.push_back(each->tables->clip_grad_norm(std::numeric_limits<double>::infinity()));
    square += norms.back() * norms.back();
  }
  const double norm = std::sqrt(square);
  if (norm > max_norm) {
    const double factor = max_norm / norm;
    for (at::Tensor& gradient : dense) gradient.mul_(factor);
    for (std::size_t i = 0; i < norms.size(); ++i) {
      if (norms[i] > 0) state.sharded[i]->tables->clip_grad_norm(norms[i] * factor);
    }
  }
  return norm;
}

std::map<std::string, at::Tensor> state_dict_of(const ModelParallelParts& parts) {
  const State& state = parts.state();
  std::map<std::string, at::Tensor> all = data_parallel::state_of(*state.module);
  for (const std::string& name : state.shard_names) all.erase(name);
  for (const auto& each : state.sharded) {
    for (auto& [table, weight] : each->tables->gather_tables()) {
      all[each->weight_name(table)] = weight;
    }
  }
  return all;
}

void load_state_dict(ModelParallelParts& parts, const std::map<std::string, at::Tensor>& given) {
  const State& state = parts.state();
  std::map<std::string, at::Tensor> rest = given;
  std::vector<std::map<std::string, at::Tensor>> tables;
  for (const auto& each : state.sharded) {
    tables.emplace_back();
    for (const auto& config : each->configs) {
      const auto found = rest.find(each->weight_name(config.name));
      TESSERA_CHECK_VALUE(found != rest.end(), kModelParallel, ": '",
                          each->weight_name(config.name),
                          "' is missing among what is to be loaded.");
      TESSERA_CHECK_VALUE(
          (found->second.sizes() == at::IntArrayRef{config.num_embeddings, config.embedding_dim}),
          kModelParallel, ": '", found->first, "' has shape ", found->second.sizes(),
          ", it should have [", config.num_embeddings, ", ", config.embedding_dim, "].");
      tables.back()[config.name] = found->second;
      rest.erase(found);
    }
  }
  // What the module itself calls shards stays as it is until the tables are loaded.
  for (const auto& parameter : state.module->named_parameters()) {
    if (std::find(state.shard_names.begin(), state.shard_names.end(), parameter.key()) !=
        state.shard_names.end()) {
      rest[parameter.key()] = parameter.value().detach();
    }
  }
  // Dense data-parallel tables are loaded with the tables.
  for (const auto& [name, tensor] : data_parallel::state_of(*state.module)) {
    if (given.count(name) != 0 && rest.count(name) == 0) rest[name] = given.at(name);
  }
  data_parallel::load_state(*state.module, rest);
  for (std::size_t i = 0; i < tables.size(); ++i) state.sharded[i]->tables->load_tables(tables[i]);
}

}  // namespace tessera::sharding
