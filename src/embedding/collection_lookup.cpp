#include "tessera/embedding/collection_lookup.h"

#include <mutex>

#include <ATen/Functions.h>

#include "tessera/core/check.h"
#include "tessera/jagged/inverse_indices.h"

namespace tessera::embedding {

using jagged::InverseIndices;
using jagged::JaggedTensor;
using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;

struct CollectionLookup::State {
  std::string operation;
  std::vector<EmbeddingTableConfig> tables;
  TableBatchOptions options;
  bool is_pooled = true;
  std::vector<std::string> names;
  std::vector<std::string> features;  // one per name
  std::vector<std::int64_t> dims;     // one per name
  std::vector<Feature> places;
  // The tables as last bound, and what they were bound to.
  std::mutex mutex;
  std::unique_ptr<TableBatch> batch;
  std::vector<std::pair<const void*, const void*>> bound;
};

namespace {

// What tells whether a tensor is still the one that was bound: moving a module to another device or
// type keeps the tensor and changes its memory.
std::pair<const void*, const void*> identity(const at::Tensor& weight) {
  return {weight.unsafeGetTensorImpl(), weight.is_meta() ? nullptr : weight.const_data_ptr()};
}

// The keys in the order of the results, each once per table that uses it.
KeyedJaggedTensor arranged(const std::string& operation, const KeyedJaggedTensor& features,
                           const std::vector<std::string>& wanted) {
  std::vector<std::int64_t> order;
  order.reserve(wanted.size());
  for (const auto& name : wanted) {
    TESSERA_CHECK_VALUE(features.has_key(name), operation, ": there is no feature '", name,
                        "' among the ", features.keys().size(), " keys of the batch.");
    order.push_back(static_cast<std::int64_t>(features.index_of(name)));
  }
  bool is_in_order = order.size() == features.keys().size();
  for (std::size_t i = 0; is_in_order && i < order.size(); ++i) {
    is_in_order = order[i] == static_cast<std::int64_t>(i);
  }
  return is_in_order ? features : features.permute(order);
}

LookupInput input_of(const KeyedJaggedTensor& features, bool is_weighted) {
  LookupInput input;
  input.ids = features.values().contiguous();
  input.offsets = features.offsets().contiguous();
  if (is_weighted) input.weights = features.weights().to(at::kFloat).contiguous();
  if (features.variable_stride_per_key()) input.batch_sizes = features.stride_per_key();
  return input;
}

// Rows of a variable batch, feature by feature, become [batch, columns]: each feature's rows are
// repeated as its inverse indices say.
at::Tensor spread(const std::string& operation, const at::Tensor& rows,
                  const KeyedJaggedTensor& features, const std::optional<InverseIndices>& inverse,
                  const std::vector<std::string>& wanted, const std::vector<std::int64_t>& dims) {
  const auto& strides = features.stride_per_key();
  std::vector<at::Tensor> columns;
  std::int64_t begin = 0;
  for (std::size_t f = 0; f < wanted.size(); ++f) {
    at::Tensor own = rows.narrow(0, begin, strides[f] * dims[f]).view({strides[f], dims[f]});
    begin += strides[f] * dims[f];
    if (inverse) own = own.index_select(0, jagged::inverse_of(*inverse, wanted[f], operation));
    columns.push_back(own);
    TESSERA_CHECK_VALUE(own.size(0) == columns[0].size(0), operation, ": feature '", wanted[f],
                        "' has a batch of ", own.size(0), ", feature '", wanted[0], "' of ",
                        columns[0].size(0), ". Give inverse indices with a variable batch.");
  }
  return at::cat(columns, 1);
}

}  // namespace

CollectionLookup::CollectionLookup(std::string operation, std::vector<EmbeddingTableConfig> tables,
                                   bool is_pooled, TableBatchOptions options)
    : state_(std::make_shared<State>()) {
  check_tables(operation, tables);
  TESSERA_CHECK_VALUE(!tables.empty(), operation, ": there are no tables.");
  State& state = *state_;
  const auto names = embedding_names_by_table(tables);
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const auto& table = tables[t];
    TESSERA_CHECK_VALUE(is_trainable(table.data_type), operation, ": table '", table.name,
                        "' has rows of ", name_of(table.data_type),
                        ", which do not train. Use FP32, FP16 or BF16.");
    TESSERA_CHECK_VALUE(!is_pooled || table.pooling != PoolingType::kNone, operation, ": table '",
                        table.name, "' has pooling NONE. Use an EmbeddingCollection.");
    for (const auto& feature : table.features()) {
      state.features.push_back(feature);
      state.dims.push_back(table.embedding_dim);
      state.places.push_back({feature, static_cast<std::int64_t>(t)});
    }
    state.names.insert(state.names.end(), names[t].begin(), names[t].end());
  }
  state.operation = std::move(operation);
  state.tables = std::move(tables);
  state.options = std::move(options);
  state.is_pooled = is_pooled;
}

const TableBatch& CollectionLookup::bind(const std::vector<at::Tensor>& weights) const {
  State& state = *state_;
  TESSERA_CHECK_VALUE(weights.size() == state.tables.size(), state.operation, ": there are ",
                      weights.size(), " weights for ", state.tables.size(), " tables.");
  const std::lock_guard<std::mutex> lock(state.mutex);
  std::vector<std::pair<const void*, const void*>> now;
  now.reserve(weights.size());
  for (const auto& weight : weights) now.push_back(identity(weight));
  if (state.batch == nullptr || now != state.bound) {
    std::vector<Table> tables;
    for (std::size_t t = 0; t < weights.size(); ++t) {
      TESSERA_CHECK_VALUE(!weights[t].is_meta(), state.operation, ": table '", state.tables[t].name,
                          "' is on the meta device. Give it memory before looking up.");
      tables.push_back({state.tables[t].name, weights[t],
                        state.is_pooled ? state.tables[t].pooling : PoolingType::kNone});
    }
    state.batch = std::make_unique<TableBatch>(std::move(tables), state.places, state.options);
    state.bound = std::move(now);
  }
  return *state.batch;
}

const TableBatch& CollectionLookup::batch() const {
  TESSERA_CHECK_VALUE(state_->batch != nullptr, state_->operation,
                      ": nothing has been looked up yet.");
  return *state_->batch;
}

KeyedTensor CollectionLookup::pooled(const KeyedJaggedTensor& features,
                                     const std::vector<at::Tensor>& weights,
                                     bool is_weighted) const {
  State& state = *state_;
  TESSERA_CHECK_VALUE(!is_weighted || features.weights_or_none().defined(), state.operation,
                      ": the collection is weighted, but the features have no weights.");
  const TableBatch& batch = bind(weights);
  const KeyedJaggedTensor input = arranged(state.operation, features, state.features);
  at::Tensor rows = batch.pooled(input_of(input, is_weighted));
  if (features.variable_stride_per_key()) {
    rows = spread(state.operation, rows, input, features.inverse_indices_or_none(), state.features,
                  state.dims);
  }
  return KeyedTensor(state.names, state.dims, rows);
}

NamedRows CollectionLookup::sequence(const KeyedJaggedTensor& features,
                                     const std::vector<at::Tensor>& weights,
                                     bool need_indices) const {
  State& state = *state_;
  const TableBatch& batch = bind(weights);
  const KeyedJaggedTensor input = arranged(state.operation, features, state.features);
  const at::Tensor rows = batch.sequence(input_of(input, false));
  NamedRows named;
  named.reserve(state.names.size());
  std::vector<std::int64_t> sizes;
  for (std::size_t f = 0; f < state.names.size(); ++f) {
    sizes.push_back(input.length_per_key()[f] * state.dims[f]);
  }
  // One cut, not many views: its gradient is put together once.
  const std::vector<at::Tensor> parts = rows.split_with_sizes(sizes);
  const auto& inverse = features.inverse_indices_or_none();
  for (std::size_t f = 0; f < state.names.size(); ++f) {
    const JaggedTensor feature = input.feature(f);
    JaggedTensor bags(parts[f].view({input.length_per_key()[f], state.dims[f]}),
                      need_indices ? feature.values() : at::Tensor(), feature.lengths());
    if (inverse && features.variable_stride_per_key()) {
      bags = jagged::spread_bags(bags,
                                 jagged::inverse_of(*inverse, state.features[f], state.operation));
    }
    named.emplace_back(state.names[f], std::move(bags));
  }
  return named;
}

const std::vector<EmbeddingTableConfig>& CollectionLookup::tables() const noexcept {
  return state_->tables;
}
const std::vector<std::string>& CollectionLookup::names() const noexcept { return state_->names; }
const std::vector<std::int64_t>& CollectionLookup::dims() const noexcept { return state_->dims; }

std::vector<at::Tensor> make_weights(const std::vector<EmbeddingTableConfig>& tables,
                                     at::Device device) {
  std::vector<at::Tensor> weights;
  weights.reserve(tables.size());
  for (const auto& table : tables) {
    const at::ScalarType type = scalar_type(table.data_type);
    const bool is_meta = device.is_meta();
    at::Tensor weight = is_meta
                            ? at::empty({table.num_embeddings, table.embedding_dim},
                                        at::TensorOptions(type).device(device))
                            : empty_rows(table.num_embeddings, table.embedding_dim, type, device);
    if (!is_meta) initialize(table, weight);
    weights.push_back(weight.requires_grad_(true));
  }
  return weights;
}

}  // namespace tessera::embedding
