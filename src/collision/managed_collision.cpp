// Collections of managed collision on one rank: ids of many tables onto rows, and their tables.

#include "tessera/collision/managed_collision.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "collision/mapped_features.h"
#include "tessera/collision/managed_collision_tables.h"
#include "tessera/core/check.h"

namespace tessera::collision {

using embedding::EmbeddingTableConfig;
using jagged::KeyedJaggedTensor;

// ---- what features become ----

namespace {

std::vector<std::int64_t> places_of(const std::vector<EmbeddingTableConfig>& tables,
                                    const KeyedJaggedTensor& features) {
  std::vector<std::int64_t> places;
  for (const EmbeddingTableConfig& table : tables) {
    for (const std::string& feature : table.features()) {
      TESSERA_CHECK_VALUE(features.has_key(feature), "collision: there is no feature '", feature,
                          "', which table '", table.name, "' needs, among the ",
                          features.keys().size(), " keys of the batch.");
      places.push_back(static_cast<std::int64_t>(features.index_of(feature)));
    }
  }
  return places;
}

}  // namespace

MappedFeatures::MappedFeatures(const std::vector<EmbeddingTableConfig>& tables,
                               const KeyedJaggedTensor& features)
    : arranged_(features.permute(places_of(tables, features))),
      inverse_(features.inverse_indices_or_none()) {
  for (const auto& own : embedding::embedding_names_by_table(tables)) {
    names_.insert(names_.end(), own.begin(), own.end());
  }
  std::size_t key = 0;
  for (const EmbeddingTableConfig& table : tables) {
    first_.push_back(arranged_.offset_per_key()[key]);
    for (const std::string& feature : table.features()) {
      sources_.push_back(feature);
      ++key;
    }
  }
  first_.push_back(arranged_.offset_per_key()[key]);
}

at::Tensor MappedFeatures::ids_of(std::size_t table) const {
  return arranged_.values().slice(0, first_[table], first_[table + 1]);
}

KeyedJaggedTensor MappedFeatures::with_rows(const at::Tensor& rows) const {
  jagged::KeyedJaggedFields fields;
  fields.lengths = arranged_.lengths();
  fields.weights = arranged_.weights_or_none();
  fields.length_per_key = arranged_.length_per_key();
  if (arranged_.variable_stride_per_key()) {
    fields.stride_per_key_per_rank = arranged_.stride_per_key_per_rank();
  } else {
    fields.stride = arranged_.stride();
  }
  if (inverse_) {
    std::vector<std::int64_t> places;
    for (const std::string& source : sources_) {
      const auto found = std::find(inverse_->first.begin(), inverse_->first.end(), source);
      places.push_back(found - inverse_->first.begin());
    }
    fields.inverse_indices = jagged::InverseIndices{
        names_, inverse_->second.index_select(0, at::tensor(places, at::kLong))};
  }
  return {names_, rows, std::move(fields)};
}

std::vector<EmbeddingTableConfig> mapped_configs_of(std::vector<EmbeddingTableConfig> tables) {
  const auto names = embedding::embedding_names_by_table(tables);
  for (std::size_t t = 0; t < tables.size(); ++t) tables[t].feature_names = names[t];
  return tables;
}

void reset_rows(const EmbeddingTableConfig& table, const at::Tensor& weight, const at::Tensor& rows,
                const std::vector<at::Tensor>& states,
                const embedding::OptimizerOptions& optimizer) {
  if (rows.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor fresh = at::empty({rows.numel(), weight.size(1)}, weight.options());
  embedding::initialize(table, fresh);
  // Not seen by autograd: a backward pass of an earlier lookup still runs.
  weight.variable_data().index_copy_(0, rows, fresh);
  const bool is_adagrad = optimizer.kind == embedding::OptimizerKind::kAdagrad ||
                          optimizer.kind == embedding::OptimizerKind::kRowWiseAdagrad;
  for (const at::Tensor& state : states) {
    at::Tensor(state).index_fill_(0, rows, is_adagrad ? optimizer.initial_accumulator : 0.0);
  }
}

// ---- collections ----

ManagedCollisionCollection::ManagedCollisionCollection(const ManagedCollisionModules& modules,
                                                       std::vector<EmbeddingTableConfig> tables)
    : torch::nn::Module("ManagedCollisionCollection"), tables_(std::move(tables)) {
  embedding::check_tables("collision", tables_);
  const auto holder = register_module("_managed_collision_modules",
                                      std::make_shared<torch::nn::Module>("ManagedCollision"));
  for (const EmbeddingTableConfig& table : tables_) {
    const auto found = modules.find(table.name);
    TESSERA_CHECK_VALUE(found != modules.end() && found->second != nullptr, "collision: table '",
                        table.name, "' has no managed collision module.");
    TESSERA_CHECK_VALUE(found->second->output_size() == table.num_embeddings,
                        "collision: the module of table '", table.name, "' has ",
                        found->second->output_size(), " rows; the table has ", table.num_embeddings,
                        ".");
    found->second->begin(table.name);
    modules_.emplace(table.name, found->second);
    holder->register_module(table.name, found->second);
  }
}

KeyedJaggedTensor ManagedCollisionCollection::forward(const KeyedJaggedTensor& features) {
  const MappedFeatures mapped(tables_, features);
  std::vector<at::Tensor> rows;
  // One call for all features of a table: one iteration, one decision.
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    rows.push_back(modules_.at(tables_[t].name)->forward(mapped.ids_of(t)));
  }
  return mapped.with_rows(at::cat(rows));
}

std::vector<EmbeddingTableConfig> ManagedCollisionCollection::mapped_configs() const {
  return mapped_configs_of(tables_);
}

std::map<std::string, std::optional<at::Tensor>> ManagedCollisionCollection::evict() {
  std::map<std::string, std::optional<at::Tensor>> evicted;
  for (const auto& [table, module] : modules_) evicted[table] = module->evict();
  return evicted;
}

std::map<std::string, std::int64_t> ManagedCollisionCollection::open_slots() const {
  std::map<std::string, std::int64_t> slots;
  for (const auto& [table, module] : modules_) slots[table] = module->open_slots();
  return slots;
}

// ---- tables behind them ----

namespace {

/// Resets the rows that got another id in the tables of a collection.
template <class Collection>
void reset_evicted(ManagedCollisionCollection& ids, const Collection& tables) {
  const auto evicted = ids.evict();
  const auto& optimizer = tables.batch().optimizer();
  std::map<std::string, at::Tensor> kept;
  if (optimizer != nullptr) kept = optimizer->state_dict();
  for (const EmbeddingTableConfig& table : ids.embedding_configs()) {
    const auto& rows = evicted.at(table.name);
    if (!rows) continue;
    std::vector<at::Tensor> states;
    for (const char* slot : {".momentum1", ".momentum2"}) {
      const auto state = kept.find(table.name + slot);
      if (state != kept.end()) states.push_back(state->second);
    }
    reset_rows(table, tables.weight(table.name), *rows, states,
               optimizer == nullptr ? embedding::OptimizerOptions{} : optimizer->options());
  }
}

}  // namespace

ManagedCollisionEmbeddingBagCollection::ManagedCollisionEmbeddingBagCollection(
    std::vector<embedding::EmbeddingBagConfig> tables, const ManagedCollisionModules& modules,
    bool return_remapped_features, bool is_weighted, const embedding::TableBatchOptions& options)
    : torch::nn::Module("ManagedCollisionEmbeddingBagCollection"),
      ids_(register_module(
          "_managed_collision_collection",
          std::make_shared<ManagedCollisionCollection>(modules, std::move(tables)))),
      tables_(register_module("_embedding_module",
                              std::make_shared<embedding::EmbeddingBagCollection>(
                                  ids_->mapped_configs(), is_weighted, at::kCPU, options))),
      returns_remapped_(return_remapped_features) {}

std::pair<jagged::KeyedTensor, RemappedFeatures> ManagedCollisionEmbeddingBagCollection::forward(
    const KeyedJaggedTensor& features) {
  const KeyedJaggedTensor mapped = ids_->forward(features);
  reset_evicted(*ids_, *tables_);
  return {tables_->forward(mapped), returns_remapped_ ? RemappedFeatures(mapped) : std::nullopt};
}

ManagedCollisionEmbeddingCollection::ManagedCollisionEmbeddingCollection(
    std::vector<embedding::EmbeddingConfig> tables, const ManagedCollisionModules& modules,
    bool return_remapped_features, const embedding::TableBatchOptions& options)
    : torch::nn::Module("ManagedCollisionEmbeddingCollection"),
      ids_(register_module(
          "_managed_collision_collection",
          std::make_shared<ManagedCollisionCollection>(modules, std::move(tables)))),
      tables_(register_module("_embedding_module", std::make_shared<embedding::EmbeddingCollection>(
                                                       ids_->mapped_configs(), at::kCPU,
                                                       /*need_indices=*/false, options))),
      returns_remapped_(return_remapped_features) {}

std::pair<embedding::NamedRows, RemappedFeatures> ManagedCollisionEmbeddingCollection::forward(
    const KeyedJaggedTensor& features) {
  const KeyedJaggedTensor mapped = ids_->forward(features);
  reset_evicted(*ids_, *tables_);
  return {tables_->forward(mapped), returns_remapped_ ? RemappedFeatures(mapped) : std::nullopt};
}

}  // namespace tessera::collision
