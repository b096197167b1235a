#include <ATen/Functions.h>

#include "tessera/core/check.h"
#include "tessera/embedding/embedding_bag.h"
#include "tessera/embedding/embedding_bag_collection.h"
#include "tessera/embedding/embedding_collection.h"

namespace tessera::embedding {

using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;

namespace {

constexpr const char* kWeight = "weight";

// A module whose children are the tables, each with its weight.
std::vector<at::Tensor> register_tables(torch::nn::Module& owner, const char* group,
                                        const std::vector<EmbeddingTableConfig>& tables,
                                        at::Device device) {
  const auto holder = owner.register_module(group, std::make_shared<torch::nn::Module>(group));
  std::vector<at::Tensor> weights = make_weights(tables, device);
  for (std::size_t t = 0; t < tables.size(); ++t) {
    weights[t] =
        holder->register_module(tables[t].name, std::make_shared<torch::nn::Module>("Table"))
            ->register_parameter(kWeight, weights[t]);
  }
  return weights;
}

// Drops the tables of a collection for those of another.
void replace_tables(torch::nn::Module& owner, const char* group, const torch::nn::Module& other,
                    std::vector<at::Tensor>& weights) {
  const auto tables = other.named_children()[group];
  owner.unregister_module(group);
  owner.register_module(group, tables);
  weights.clear();
}

at::Tensor weight_of(const char* operation, const std::vector<EmbeddingTableConfig>& tables,
                     const std::vector<at::Tensor>& weights, const std::string& table) {
  TESSERA_CHECK_VALUE(!weights.empty(), operation, ": the tables lie elsewhere; ask there for '",
                      table, "'.");
  for (std::size_t t = 0; t < tables.size(); ++t) {
    if (tables[t].name == table) return weights[t];
  }
  TESSERA_CHECK_INDEX(false, operation, ": there is no table '", table, "'.");
}

void fill(const std::vector<EmbeddingTableConfig>& tables, const std::vector<at::Tensor>& weights) {
  for (std::size_t t = 0; t < weights.size(); ++t) {
    if (!weights[t].is_meta()) initialize(tables[t], weights[t].detach());
  }
}

constexpr const char* kBags = "embedding_bags";
constexpr const char* kSequences = "embeddings";
constexpr const char* kBagOperation = "embed.bag_collection";
constexpr const char* kSequenceOperation = "embed.collection";

}  // namespace

EmbeddingBagCollection::EmbeddingBagCollection(std::vector<EmbeddingBagConfig> tables,
                                               bool is_weighted, at::Device device,
                                               TableBatchOptions options)
    : torch::nn::Module("EmbeddingBagCollection"),
      lookup_(kBagOperation, std::move(tables), /*is_pooled=*/true, std::move(options)),
      is_weighted_(is_weighted),
      weights_(register_tables(*this, kBags, lookup_.tables(), device)) {}

KeyedTensor EmbeddingBagCollection::forward(const KeyedJaggedTensor& features) {
  return forward_ ? forward_(features) : lookup_.pooled(features, weights_, is_weighted_);
}

void EmbeddingBagCollection::delegate(const std::shared_ptr<torch::nn::Module>& tables,
                                      Forward forward) {
  replace_tables(*this, kBags, *tables, weights_);
  forward_ = std::move(forward);
  delegated_ = tables;
}

const std::vector<EmbeddingBagConfig>& EmbeddingBagCollection::embedding_bag_configs()
    const noexcept {
  return lookup_.tables();
}

void EmbeddingBagCollection::reset_parameters() { fill(lookup_.tables(), weights_); }

at::Tensor EmbeddingBagCollection::weight(const std::string& table) const {
  return weight_of(kBagOperation, lookup_.tables(), weights_, table);
}

const TableBatch& EmbeddingBagCollection::batch() const { return lookup_.bind(weights_); }

EmbeddingCollection::EmbeddingCollection(std::vector<EmbeddingConfig> tables, at::Device device,
                                         bool need_indices, TableBatchOptions options)
    : torch::nn::Module("EmbeddingCollection"),
      lookup_(kSequenceOperation, std::move(tables), /*is_pooled=*/false, std::move(options)),
      need_indices_(need_indices),
      weights_(register_tables(*this, kSequences, lookup_.tables(), device)) {}

NamedRows EmbeddingCollection::forward(const KeyedJaggedTensor& features) {
  return forward_ ? forward_(features) : lookup_.sequence(features, weights_, need_indices_);
}

void EmbeddingCollection::delegate(const std::shared_ptr<torch::nn::Module>& tables,
                                   Forward forward) {
  replace_tables(*this, kSequences, *tables, weights_);
  forward_ = std::move(forward);
  delegated_ = tables;
}

const std::vector<EmbeddingConfig>& EmbeddingCollection::embedding_configs() const noexcept {
  return lookup_.tables();
}

std::vector<std::vector<std::string>> EmbeddingCollection::embedding_names_by_table() const {
  return embedding::embedding_names_by_table(lookup_.tables());
}

std::int64_t EmbeddingCollection::embedding_dim() const {
  const auto& tables = lookup_.tables();
  for (const auto& table : tables) {
    TESSERA_CHECK_VALUE(table.embedding_dim == tables[0].embedding_dim, kSequenceOperation,
                        ": table '", table.name, "' has ", table.embedding_dim, " columns, table '",
                        tables[0].name, "' has ", tables[0].embedding_dim,
                        "; there is no one number.");
  }
  return tables[0].embedding_dim;
}

void EmbeddingCollection::reset_parameters() { fill(lookup_.tables(), weights_); }

at::Tensor EmbeddingCollection::weight(const std::string& table) const {
  return weight_of(kSequenceOperation, lookup_.tables(), weights_, table);
}

const TableBatch& EmbeddingCollection::batch() const { return lookup_.bind(weights_); }

EmbeddingBag::EmbeddingBag(const EmbeddingBagOptions& options)
    : torch::nn::Module("EmbeddingBag"), options_(options) {
  TESSERA_CHECK_VALUE(options.num_embeddings > 0 && options.embedding_dim > 0,
                      "embed.bag: the table has ", options.num_embeddings, " rows of ",
                      options.embedding_dim, " numbers. Both must be at least 1.");
  TESSERA_CHECK_VALUE(options.mode != PoolingType::kNone,
                      "embed.bag: the mode must be SUM or MEAN.");
  TESSERA_CHECK_VALUE(is_trainable(options.data_type), "embed.bag: rows of ",
                      name_of(options.data_type), " do not train. Use FP32, FP16 or BF16.");
  weight = register_parameter(
      kWeight,
      options.device.is_meta()
          ? at::empty({options.num_embeddings, options.embedding_dim},
                      at::TensorOptions(scalar_type(options.data_type)).device(options.device))
          : empty_rows(options.num_embeddings, options.embedding_dim,
                       scalar_type(options.data_type), options.device));
  reset_parameters();
}

void EmbeddingBag::reset_parameters() {
  if (!weight.is_meta()) weight.detach().normal_();
}

const TableBatch& EmbeddingBag::batch() {
  if (batch_ == nullptr || bound_ != weight.const_data_ptr()) {
    batch_ = std::make_unique<TableBatch>(std::vector<Table>{{"weight", weight, options_.mode}},
                                          std::vector<Feature>{{"input", 0}}, options_.table);
    bound_ = weight.const_data_ptr();
  }
  return *batch_;
}

at::Tensor EmbeddingBag::forward(const at::Tensor& input, const at::Tensor& offsets,
                                 const at::Tensor& per_sample_weights) {
  TESSERA_CHECK_VALUE(!weight.is_meta(),
                      "embed.bag: the table is on the meta device. Give it memory first.");
  TESSERA_CHECK_VALUE(input.dim() == 2 ? !offsets.defined() : input.dim() == 1 && offsets.defined(),
                      "embed.bag: the input has ", input.dim(), " dimensions and ",
                      offsets.defined() ? "offsets" : "no offsets",
                      ". Give 1 dimension with offsets, or 2 without.");
  TESSERA_CHECK_VALUE(!per_sample_weights.defined() || per_sample_weights.sizes() == input.sizes(),
                      "embed.bag: the weights have shape ", per_sample_weights.sizes(),
                      ", the input ", input.sizes(), ".");
  LookupInput lookup;
  lookup.ids = input.reshape({-1}).contiguous();
  if (per_sample_weights.defined()) {
    lookup.weights = per_sample_weights.reshape({-1}).to(at::kFloat).contiguous();
  }
  if (input.dim() == 2) {
    const std::int64_t length = input.size(1);
    lookup.offsets =
        at::arange(0, input.size(0) + 1, at::TensorOptions(at::kLong).device(input.device()))
            .mul_(length);
  } else if (options_.include_last_offset) {
    lookup.offsets = offsets.contiguous();
  } else {
    lookup.offsets = at::cat({offsets, at::full({1}, input.numel(), offsets.options())});
  }
  return batch().pooled(lookup);
}

}  // namespace tessera::embedding
