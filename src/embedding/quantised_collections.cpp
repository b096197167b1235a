#include "tessera/embedding/quantised_collections.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>

#include "tessera/core/check.h"

namespace tessera::embedding {
namespace {

using jagged::JaggedTensor;
using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;

/// The quantised form of a module that was trained, with its rows rounded to `type`.
template <class Quantised, class Module>
std::shared_ptr<Quantised> rounded(const Module& module, std::vector<EmbeddingTableConfig> tables,
                                   DataType type, bool flag, const QuantOptions& options) {
  for (EmbeddingTableConfig& table : tables) table.data_type = type;
  auto made = std::make_shared<Quantised>(tables, flag, options);
  for (const EmbeddingTableConfig& table : tables) {
    made->assign(table.name, module.weight(table.name));
  }
  return made;
}

}  // namespace

RowType row_type_of(DataType type) noexcept {
  switch (type) {
    case DataType::kFP16:
      return RowType::kFp16;
    case DataType::kBF16:
      return RowType::kBf16;
    case DataType::kINT8:
      return RowType::kInt8;
    case DataType::kINT4:
      return RowType::kInt4;
    case DataType::kINT2:
      return RowType::kInt2;
    default:
      return RowType::kFp32;
  }
}

QuantisedGroups::QuantisedGroups(std::string operation, std::vector<EmbeddingTableConfig> tables,
                                 bool is_pooled, const QuantOptions& options)
    : operation_(std::move(operation)), tables_(std::move(tables)), options_(options) {
  check_tables(operation_, tables_);
  TESSERA_CHECK_VALUE(at::isFloatingType(options.output_type), operation_,
                      ": outputs are floating point, not ", options.output_type, ".");
  std::vector<std::vector<QuantisedTableSpec>> specs;
  std::vector<std::pair<PoolingType, std::int64_t>> kinds;
  std::vector<std::int64_t> widths;
  for (const EmbeddingTableConfig& table : tables_) {
    TESSERA_CHECK_VALUE(!is_pooled || table.pooling != PoolingType::kNone, operation_, ": table '",
                        table.name, "' has no pooling.");
    const auto kind = is_pooled ? std::pair(table.pooling, std::int64_t{0})
                                : std::pair(PoolingType::kNone, table.embedding_dim);
    const auto found = std::find(kinds.begin(), kinds.end(), kind);
    const auto group = static_cast<std::size_t>(found - kinds.begin());
    if (found == kinds.end()) {
      kinds.push_back(kind);
      specs.emplace_back();
      features_.emplace_back();
      widths.push_back(0);
    }
    places_.push_back({group, specs[group].size(), features_[group].size(), widths[group]});
    specs[group].push_back({table.name, table.num_embeddings, table.embedding_dim,
                            row_type_of(table.data_type), table.features()});
    for (const std::string& feature : table.features()) {
      features_[group].push_back(feature);
      widths[group] += table.embedding_dim;
    }
  }
  for (std::size_t g = 0; g < specs.size(); ++g) {
    groups_.emplace_back(std::move(specs[g]), kinds[g].first, options.row_alignment,
                         options.device);
  }
}

const QuantisedGroups::Place& QuantisedGroups::place_of(const std::string& table) const {
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    if (tables_[t].name == table) return places_[t];
  }
  TESSERA_CHECK_INDEX(false, operation_, ": there is no table '", table, "'.");
}

const at::Tensor& QuantisedGroups::rows(const std::string& table) const {
  const Place& place = place_of(table);
  return groups_[place.group].rows(place.table);
}

void QuantisedGroups::assign(const std::string& table, const at::Tensor& numbers) {
  const Place& place = place_of(table);
  groups_[place.group].assign(place.table, numbers);
}

at::Tensor QuantisedGroups::dequantised(const std::string& table) const {
  const Place& place = place_of(table);
  return groups_[place.group].dequantised(place.table);
}

void QuantisedGroups::show(torch::nn::Module& module, const std::string& folder) const {
  auto all = std::make_shared<torch::nn::Module>();
  for (const EmbeddingTableConfig& table : tables_) {
    auto one = std::make_shared<torch::nn::Module>();
    one->register_buffer("weight", rows(table.name));
    all->register_module(table.name, one);
  }
  module.register_module(folder, all);
}

KeyedJaggedTensor QuantisedGroups::features_of(const KeyedJaggedTensor& features,
                                               std::size_t group) const {
  TESSERA_CHECK_VALUE(!features.variable_stride_per_key(), operation_,
                      ": all features of a batch must have the same number of samples.");
  const QuantisedTables& tables = groups_[group];
  for (std::size_t t = 0; t < tables.tables().size(); ++t) {
    const at::Tensor& rows = tables.rows(t);
    TESSERA_CHECK_VALUE(rows.device() == options_.device && rows.scalar_type() == at::kByte,
                        operation_, ": the rows of table '", tables.tables()[t].name,
                        "' were moved to ", rows.device(), " or converted to ", rows.scalar_type(),
                        ". Make the module where it is used.");
  }
  std::vector<std::int64_t> order;
  for (const std::string& name : features_[group]) {
    TESSERA_CHECK_VALUE(features.has_key(name), operation_, ": the batch has no feature '", name,
                        "'.");
    order.push_back(static_cast<std::int64_t>(features.index_of(name)));
  }
  return features.keys() == features_[group] ? features : features.permute(order);
}

std::vector<at::Tensor> QuantisedGroups::pooled(const KeyedJaggedTensor& features,
                                                bool is_weighted) const {
  std::vector<at::Tensor> outputs;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const KeyedJaggedTensor own = features_of(features, g);
    outputs.push_back(groups_[g]
                          .forward(own.values(), own.offsets(),
                                   is_weighted ? std::optional(own.weights()) : std::nullopt)
                          .to(options_.output_type));
  }
  std::vector<at::Tensor> found;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const std::int64_t dim = tables_[t].embedding_dim;
    std::int64_t column = places_[t].column;
    for (std::size_t f = 0; f < tables_[t].features().size(); ++f, column += dim) {
      found.push_back(outputs[places_[t].group].narrow(1, column, dim));
    }
  }
  return found;
}

std::vector<at::Tensor> QuantisedGroups::sequence(const KeyedJaggedTensor& features) const {
  std::vector<at::Tensor> outputs;
  std::vector<std::vector<std::int64_t>> begins;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const KeyedJaggedTensor own = features_of(features, g);
    outputs.push_back(groups_[g].forward(own.values(), own.offsets()).to(options_.output_type));
    begins.push_back(own.offset_per_key());
  }
  std::vector<at::Tensor> found;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const Place& place = places_[t];
    const std::vector<std::int64_t>& begin = begins[place.group];
    for (std::size_t f = place.feature; f < place.feature + tables_[t].features().size(); ++f) {
      found.push_back(outputs[place.group].narrow(0, begin[f], begin[f + 1] - begin[f]));
    }
  }
  return found;
}

QuantEmbeddingBagCollection::QuantEmbeddingBagCollection(std::vector<EmbeddingBagConfig> tables,
                                                         bool is_weighted, QuantOptions options)
    : groups_("embed.quant_bags", std::move(tables), true, options), is_weighted_(is_weighted) {
  groups_.show(*this, "embedding_bags");
}

std::shared_ptr<QuantEmbeddingBagCollection> QuantEmbeddingBagCollection::from_float(
    const EmbeddingBagCollection& module, DataType type, QuantOptions options) {
  return rounded<QuantEmbeddingBagCollection>(module, module.embedding_bag_configs(), type,
                                              module.is_weighted(), options);
}

KeyedTensor QuantEmbeddingBagCollection::forward(const KeyedJaggedTensor& features) const {
  std::vector<std::string> names;
  std::vector<std::int64_t> dims;
  const auto by_table = embedding_names_by_table(groups_.tables());
  for (std::size_t t = 0; t < by_table.size(); ++t) {
    for (const std::string& name : by_table[t]) {
      names.push_back(name);
      dims.push_back(groups_.tables()[t].embedding_dim);
    }
  }
  return KeyedTensor(std::move(names), std::move(dims),
                     at::cat(groups_.pooled(features, is_weighted_), 1));
}

QuantEmbeddingCollection::QuantEmbeddingCollection(std::vector<EmbeddingConfig> tables,
                                                   bool need_indices, QuantOptions options)
    : groups_("embed.quant_rows", std::move(tables), false, options), need_indices_(need_indices) {
  groups_.show(*this, "embeddings");
}

std::shared_ptr<QuantEmbeddingCollection> QuantEmbeddingCollection::from_float(
    const EmbeddingCollection& module, DataType type, QuantOptions options) {
  return rounded<QuantEmbeddingCollection>(module, module.embedding_configs(), type,
                                           module.need_indices(), options);
}

NamedRows QuantEmbeddingCollection::forward(const KeyedJaggedTensor& features) const {
  const std::vector<at::Tensor> found = groups_.sequence(features);
  const auto by_table = embedding_names_by_table(groups_.tables());
  NamedRows named;
  for (std::size_t t = 0; t < by_table.size(); ++t) {
    const std::vector<std::string> keys = groups_.tables()[t].features();
    for (std::size_t f = 0; f < keys.size(); ++f) {
      const JaggedTensor bags = features[keys[f]];
      named.emplace_back(by_table[t][f], JaggedTensor(found[named.size()],
                                                      need_indices_ ? bags.values() : at::Tensor(),
                                                      bags.lengths()));
    }
  }
  return named;
}

}  // namespace tessera::embedding
