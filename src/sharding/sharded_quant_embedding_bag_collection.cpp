#include "tessera/sharding/sharded_quant_embedding_bag_collection.h"

#include <algorithm>
#include <numeric>
#include <set>

#include <ATen/Functions.h>
#include <ATen/TensorIndexing.h>

#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

using embedding::EmbeddingBagConfig;
using embedding::PoolingType;
using embedding::QuantEmbeddingBagCollection;
using jagged::JaggedTensor;
using jagged::KeyedJaggedFields;
using jagged::KeyedJaggedTensor;
using jagged::KeyedTensor;

std::int64_t num_features(const EmbeddingBagConfig& table) {
  return static_cast<std::int64_t>(table.features().size());
}

// Where the codes of a shard stand in a whole row, and how many bytes they have.
struct CodeBytes {
  std::int64_t head;
  std::int64_t begin;
  std::int64_t count;
};

CodeBytes code_bytes(const EmbeddingBagConfig& table, const Shard& shard) {
  const std::int64_t bits = embedding::bits_of(table.data_type);
  const std::int64_t head = embedding::row_head_bytes(embedding::row_type_of(table.data_type));
  return {head, head + shard.column * bits / 8, (shard.columns * bits + 7) / 8};
}

void check_ids(const EmbeddingBagConfig& table, const std::string& feature, const at::Tensor& ids) {
  const at::Tensor outside = at::logical_or(ids.lt(0), ids.ge(table.num_embeddings)).nonzero();
  if (outside.numel() == 0) return;
  const auto position = outside[0].item<std::int64_t>();
  TESSERA_CHECK_INDEX(false, "sharding.quant: table '", table.name, "' has ", table.num_embeddings,
                      " rows; id ", ids[position].item<std::int64_t>(), " at position ", position,
                      " of feature '", feature, "' is not one of them.");
}

}  // namespace

KeyedJaggedTensor flatten_feature_lengths(const KeyedJaggedTensor& features) {
  return features.lengths().dim() > 1 ? features.flatten_lengths() : features;
}

InferEmbeddingBagSharding::InferEmbeddingBagSharding(ShardingType type,
                                                     std::vector<QuantShardingInfo> infos,
                                                     std::vector<at::Device> devices)
    : type_(type), infos_(std::move(infos)), devices_(std::move(devices)) {
  places_.resize(devices_.size());
  for (std::size_t t = 0; t < infos_.size(); ++t) {
    const EmbeddingBagConfig& table = infos_[t].table;
    const int per_byte = 8 / std::min(embedding::bits_of(table.data_type), 8);
    std::set<int> owners;
    for (const Shard& shard : infos_[t].sharding.shards) {
      TESSERA_CHECK_VALUE(shard.rank >= 0 && shard.rank < static_cast<int>(devices_.size()),
                          "sharding.quant: table '", table.name, "' has a shard on device ",
                          shard.rank, " of ", devices_.size(), ".");
      TESSERA_CHECK_VALUE(shard.column % per_byte == 0, "sharding.quant: table '", table.name,
                          "' is cut at column ", shard.column, "; ", per_byte, " columns of ",
                          embedding::name_of(table.data_type), " share a byte.");
      if (shard.rows == 0 || shard.columns == 0) continue;
      const bool is_first = owners.insert(shard.rank).second;
      TESSERA_CHECK_VALUE(is_first || type != ShardingType::kRowWise, "sharding.quant: device ",
                          shard.rank, " has two shards of the rows of table '", table.name, "'.");
      places_[static_cast<std::size_t>(shard.rank)].push_back({t, shard});
    }
  }
}

std::vector<std::vector<std::string>> InferEmbeddingBagSharding::feature_names_per_device() const {
  std::vector<std::vector<std::string>> names(places_.size());
  for (std::size_t d = 0; d < places_.size(); ++d) {
    for (const Place& place : places_[d]) {
      for (const std::string& name : infos_[place.table].table.features()) names[d].push_back(name);
    }
  }
  return names;
}

std::vector<std::vector<GroupedQuantConfig>> InferEmbeddingBagSharding::grouped_configs_per_device(
    bool is_weighted, bool has_feature_processor) const {
  std::vector<std::vector<GroupedQuantConfig>> found(places_.size());
  for (std::size_t d = 0; d < places_.size(); ++d) {
    for (const Place& place : places_[d]) {
      const EmbeddingBagConfig& table = infos_[place.table].table;
      PoolingType pooling = table.pooling;
      bool weighs = is_weighted || has_feature_processor;
      if (type_ == ShardingType::kRowWise && pooling == PoolingType::kMean) {
        pooling = PoolingType::kSum;  // weights divide, see cut_rows
        weighs = true;
      }
      auto& groups = found[d];
      if (groups.empty() || groups.back().pooling != pooling ||
          groups.back().is_weighted != weighs) {
        groups.push_back({{}, pooling, weighs, false});
      }
      groups.back().tables.push_back({table.name, place.shard.rows, place.shard.columns,
                                      embedding::row_type_of(table.data_type), table.features()});
    }
  }
  return found;
}

KJTList InferEmbeddingBagSharding::input_dist(const KeyedJaggedTensor& features) const {
  if (type_ == ShardingType::kRowWise) return cut_rows(features);
  std::vector<std::int64_t> order;
  Sizes splits;
  for (const auto& names : feature_names_per_device()) {
    splits.push_back(static_cast<std::int64_t>(names.size()));
    for (const std::string& name : names) {
      order.push_back(static_cast<std::int64_t>(features.index_of(name)));
    }
  }
  return KJTOneToAll(splits, devices_).forward(features.permute(order));
}

// Each id to the device that has its row. The mean is over all ids of a bag, wherever their rows
// lie: ids get weights of one over their number, and devices sum.
KJTList InferEmbeddingBagSharding::cut_rows(const KeyedJaggedTensor& features) const {
  const bool any_mean = std::any_of(infos_.begin(), infos_.end(), [](const auto& info) {
    return info.table.pooling == PoolingType::kMean;
  });
  const bool is_weighted = features.weights_or_none().defined();
  KJTList found;
  for (std::size_t d = 0; d < places_.size(); ++d) {
    std::vector<std::string> names;
    std::vector<at::Tensor> ids, lengths, weights;
    for (const Place& place : places_[d]) {
      const EmbeddingBagConfig& table = infos_[place.table].table;
      for (const std::string& name : table.features()) {
        const JaggedTensor bags = features[name];
        const at::Tensor values = bags.values().to(at::kLong);
        const at::Tensor counts = bags.lengths().to(at::kLong);
        check_ids(table, name, values);
        const at::Tensor is_here = at::logical_and(values.ge(place.shard.row),
                                                   values.lt(place.shard.row + place.shard.rows));
        const at::Tensor sample =
            at::repeat_interleave(at::arange(counts.numel(), counts.options()), counts);
        const at::Tensor here = is_here.nonzero().squeeze(1);
        names.push_back(name);
        ids.push_back(values.index_select(0, here) - place.shard.row);
        lengths.push_back(at::bincount(sample.index_select(0, here), {}, counts.numel()));
        if (is_weighted || any_mean) {
          at::Tensor factor = is_weighted ? bags.weights().detach().to(at::kFloat)
                                          : at::ones_like(values, at::kFloat);
          if (table.pooling == PoolingType::kMean) factor = factor / counts.index_select(0, sample);
          weights.push_back(factor.index_select(0, here));
        }
      }
    }
    KeyedJaggedFields fields;
    fields.stride = features.stride();
    fields.lengths = names.empty() ? at::empty({0}, at::kInt) : at::cat(lengths).to(at::kInt);
    if (!weights.empty()) fields.weights = at::cat(weights);
    at::Tensor values = names.empty() ? at::empty({0}, at::kLong) : at::cat(ids);
    found.push_back(
        KeyedJaggedTensor(std::move(names), std::move(values), fields).to(devices_[d], true));
  }
  return found;
}

at::Tensor InferEmbeddingBagSharding::output_dist(const std::vector<at::Tensor>& parts) const {
  if (type_ == ShardingType::kRowWise) return sum_rows(parts);
  // Where each part of a feature stands in what the devices have found, behind each other.
  std::vector<std::vector<std::vector<std::pair<std::int64_t, Shard>>>> begins;  // table, feature
  for (const auto& info : infos_) begins.emplace_back(num_features(info.table));
  std::int64_t column = 0;
  for (const auto& places : places_) {
    for (const Place& place : places) {
      for (auto& feature : begins[place.table]) {
        feature.emplace_back(column, place.shard);
        column += place.shard.columns;
      }
    }
  }
  std::vector<std::int64_t> order;
  for (auto& table : begins) {
    for (auto& feature : table) {
      std::sort(feature.begin(), feature.end(),
                [](const auto& a, const auto& b) { return a.second.column < b.second.column; });
      for (const auto& [begin, shard] : feature) {
        for (std::int64_t c = 0; c < shard.columns; ++c) order.push_back(begin + c);
      }
    }
  }
  const auto num_used = static_cast<std::size_t>(std::count_if(
      places_.begin(), places_.end(), [](const auto& places) { return !places.empty(); }));
  const at::Tensor joined = EmbeddingsAllToOne(devices_[0], num_used, 1).forward(parts);
  if (std::is_sorted(order.begin(), order.end())) return joined;
  return joined.index_select(1, at::tensor(order, at::kLong).to(devices_[0]));
}

at::Tensor InferEmbeddingBagSharding::sum_rows(const std::vector<at::Tensor>& parts) const {
  std::vector<std::int64_t> begins;
  std::int64_t width = 0;
  for (const auto& info : infos_) {
    begins.push_back(width);
    width += info.table.embedding_dim * num_features(info.table);
  }
  std::vector<at::Tensor> whole;
  for (const auto& places : places_) {
    if (places.empty()) continue;
    TESSERA_CHECK_VALUE(whole.size() < parts.size(), "sharding.all_to_one: there are only ",
                        parts.size(), " parts.");
    const at::Tensor& part = parts[whole.size()];
    if (part.size(1) == width) {
      whole.push_back(part);
      continue;
    }
    // A device without rows of a table has none of its columns.
    at::Tensor wide = at::zeros({part.size(0), width}, part.options());
    std::int64_t from = 0;
    for (const Place& place : places) {
      const EmbeddingBagConfig& table = infos_[place.table].table;
      const std::int64_t count = table.embedding_dim * num_features(table);
      wide.narrow(1, begins[place.table], count).copy_(part.narrow(1, from, count));
      from += count;
    }
    whole.push_back(wide);
  }
  return EmbeddingsAllToOneReduce(devices_[0], whole.size()).forward(whole);
}

InferEmbeddingBagSharding create_infer_embedding_bag_sharding(ShardingType type,
                                                              std::vector<QuantShardingInfo> infos,
                                                              std::vector<at::Device> devices) {
  TESSERA_CHECK_VALUE(type == ShardingType::kTableWise || type == ShardingType::kRowWise ||
                          type == ShardingType::kColumnWise,
                      "Sharding type not supported ", name_of(type));
  return InferEmbeddingBagSharding(type, std::move(infos), std::move(devices));
}

ShardedQuantEmbeddingBagCollection::ShardedQuantEmbeddingBagCollection(
    const QuantEmbeddingBagCollection& module, const ModulePlan& plan,
    std::vector<at::Device> devices)
    : ShardedQuantEmbeddingBagCollection(module, plan, std::move(devices), false) {}

ShardedQuantEmbeddingBagCollection::ShardedQuantEmbeddingBagCollection(
    const QuantEmbeddingBagCollection& module, const ModulePlan& plan,
    std::vector<at::Device> devices, bool has_feature_processor)
    : configs_(module.embedding_bag_configs()),
      plan_(plan),
      devices_(std::move(devices)),
      is_weighted_(module.is_weighted()),
      has_feature_processor_(has_feature_processor),
      options_(module.options()) {
  const int count = static_cast<int>(devices_.size());
  TESSERA_CHECK_VALUE(count > 0, "sharding.quant: there are no devices.");
  check_module_plan("sharding.quant", configs_, plan_, {count, count});
  std::vector<std::pair<ShardingType, std::vector<QuantShardingInfo>>> kinds;
  for (const EmbeddingBagConfig& table : configs_) {
    const ParameterSharding& sharding = plan_.at(table.name);
    auto kind = std::find_if(kinds.begin(), kinds.end(),
                             [&](const auto& known) { return known.first == sharding.type; });
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {sharding.type, {}});
    kind->second.push_back({table, sharding});
  }
  for (auto& [type, infos] : kinds) {
    shardings_.push_back(create_infer_embedding_bag_sharding(type, std::move(infos), devices_));
    lookups_.push_back(std::make_shared<InferGroupedPooledEmbeddingsLookup>(
        shardings_.back().grouped_configs_per_device(is_weighted_, has_feature_processor_),
        devices_, options_));
  }
  for (const EmbeddingBagConfig& table : configs_) load(table.name, module.rows(table.name));
}

// Calls visit(table, shard, rows) for every shard of a table.
template <typename Visit>
void ShardedQuantEmbeddingBagCollection::for_each_part(const std::string& name,
                                                       const Visit& visit) const {
  for (std::size_t k = 0; k < shardings_.size(); ++k) {
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      const auto& places = shardings_[k].places()[d];
      if (places.empty()) continue;
      const NamedRowBlocks rows = lookups_[k]->lookups()[d]->named_rows();
      for (std::size_t p = 0; p < places.size(); ++p) {
        const EmbeddingBagConfig& table = shardings_[k].infos()[places[p].table].table;
        if (table.name == name) visit(table, places[p].shard, rows[p].second);
      }
    }
  }
}

void ShardedQuantEmbeddingBagCollection::load(const std::string& name, const at::Tensor& rows) {
  bool is_known = false;
  for_each_part(name, [&](const EmbeddingBagConfig& table, const Shard& shard, const at::Tensor&) {
    is_known = true;
    const std::int64_t width = embedding::row_bytes(embedding::row_type_of(table.data_type),
                                                    table.embedding_dim, options_.row_alignment);
    TESSERA_CHECK_VALUE(rows.dim() == 2 && rows.size(0) == table.num_embeddings &&
                            rows.size(1) == width && rows.scalar_type() == at::kByte,
                        "sharding.quant: rows of table '", name, "' are ", rows.sizes(), " ",
                        rows.scalar_type(), "; it has ", table.num_embeddings, " rows of ", width,
                        " bytes.");
    (void)shard;
  });
  TESSERA_CHECK_INDEX(is_known, "sharding.quant: there is no table '", name, "'.");
  for_each_part(name,
                [&](const EmbeddingBagConfig& table, const Shard& shard, const at::Tensor& own) {
                  const auto [head, begin, count] = code_bytes(table, shard);
                  const at::Tensor from = rows.narrow(0, shard.row, shard.rows);
                  // A shard of columns has the row's scale and bias too.
                  own.narrow(1, 0, head).copy_(from.narrow(1, 0, head));
                  own.narrow(1, head, count).copy_(from.narrow(1, begin, count));
                });
}

std::shared_ptr<QuantEmbeddingBagCollection> ShardedQuantEmbeddingBagCollection::whole() const {
  embedding::QuantOptions options = options_;
  options.device = at::kCPU;
  auto made = std::make_shared<QuantEmbeddingBagCollection>(configs_, is_weighted_, options);
  for (const EmbeddingBagConfig& config : configs_) {
    for_each_part(config.name,
                  [&](const EmbeddingBagConfig& table, const Shard& shard, const at::Tensor& own) {
                    const auto [head, begin, count] = code_bytes(table, shard);
                    const at::Tensor to = made->rows(table.name).narrow(0, shard.row, shard.rows);
                    to.narrow(1, 0, head).copy_(own.narrow(1, 0, head));
                    to.narrow(1, begin, count).copy_(own.narrow(1, head, count));
                  });
  }
  return made;
}

std::shared_ptr<ShardedQuantEmbeddingBagCollection> ShardedQuantEmbeddingBagCollection::copy()
    const {
  TESSERA_CHECK_VALUE(!has_feature_processor_,
                      "sharding.quant: processors cannot be copied; shard the module again.");
  return std::make_shared<ShardedQuantEmbeddingBagCollection>(*whole(), plan_, devices_);
}

std::vector<KJTList> ShardedQuantEmbeddingBagCollection::input_dist(
    const KeyedJaggedTensor& features) const {
  TESSERA_CHECK_VALUE(!features.variable_stride_per_key(),
                      "sharding.quant: all features of a batch must have the same number of "
                      "samples.");
  for (const EmbeddingBagConfig& table : configs_) {
    for (const std::string& name : table.features()) {
      TESSERA_CHECK_VALUE(features.has_key(name), "sharding.quant: the batch has no feature '",
                          name, "'.");
    }
  }
  const KeyedJaggedTensor flat = flatten_feature_lengths(features);
  std::vector<KJTList> found;
  for (const InferEmbeddingBagSharding& sharding : shardings_) {
    found.push_back(sharding.input_dist(flat));
  }
  return found;
}

std::vector<std::vector<at::Tensor>> ShardedQuantEmbeddingBagCollection::compute(
    const std::vector<KJTList>& features) {
  TESSERA_CHECK_VALUE(features.size() == lookups_.size(), "sharding.quant: there are features for ",
                      features.size(), " types of sharding, not for ", lookups_.size(), ".");
  std::vector<std::vector<at::Tensor>> found;
  for (std::size_t k = 0; k < lookups_.size(); ++k) {
    found.push_back(lookups_[k]->forward(features[k]));
  }
  return found;
}

KeyedTensor ShardedQuantEmbeddingBagCollection::output_dist(
    const std::vector<std::vector<at::Tensor>>& parts) const {
  TESSERA_CHECK_VALUE(parts.size() == shardings_.size(), "sharding.quant: there are results of ",
                      parts.size(), " types of sharding, not of ", shardings_.size(), ".");
  std::map<std::string, at::Tensor> columns;  // of each table
  for (std::size_t k = 0; k < shardings_.size(); ++k) {
    const at::Tensor joined = shardings_[k].output_dist(parts[k]);
    std::int64_t begin = 0;
    for (const auto& info : shardings_[k].infos()) {
      const std::int64_t count = info.table.embedding_dim * num_features(info.table);
      columns[info.table.name] = joined.narrow(1, begin, count);
      begin += count;
    }
  }
  std::vector<std::string> names;
  std::vector<std::int64_t> dims;
  std::vector<at::Tensor> found;
  const auto by_table = embedding::embedding_names_by_table(configs_);
  for (std::size_t t = 0; t < configs_.size(); ++t) {
    found.push_back(columns.at(configs_[t].name));
    for (const std::string& name : by_table[t]) {
      names.push_back(name);
      dims.push_back(configs_[t].embedding_dim);
    }
  }
  return KeyedTensor(std::move(names), std::move(dims), at::cat(found, 1));
}

KeyedTensor ShardedQuantEmbeddingBagCollection::compute_and_output_dist(
    const std::vector<KJTList>& features) {
  return output_dist(compute(features));
}

KeyedTensor ShardedQuantEmbeddingBagCollection::forward(const KeyedJaggedTensor& features) {
  return compute_and_output_dist(input_dist(features));
}

std::vector<std::pair<std::shared_ptr<embedding::QuantisedTables>, GroupedQuantConfig>>
ShardedQuantEmbeddingBagCollection::tbes_configs() const {
  std::vector<std::pair<std::shared_ptr<embedding::QuantisedTables>, GroupedQuantConfig>> found;
  for (const auto& lookup : lookups_) {
    for (const auto& own : lookup->lookups()) {
      if (!own) continue;
      for (std::size_t g = 0; g < own->tbes().size(); ++g) {
        found.emplace_back(own->tbes()[g], own->grouped_configs()[g]);
      }
    }
  }
  return found;
}

ShardedQuantFeatureProcessedEmbeddingBagCollection::
    ShardedQuantFeatureProcessedEmbeddingBagCollection(
        const QuantEmbeddingBagCollection& module, const ModulePlan& plan,
        std::vector<at::Device> devices,
        std::vector<std::shared_ptr<embedding::FeatureProcessor>> processors)
    : ShardedQuantEmbeddingBagCollection(module, plan, devices, true),
      processors_(std::move(processors)) {
  TESSERA_CHECK_VALUE(processors_.size() == devices.size(), "sharding.quant: there are ",
                      processors_.size(), " processors for ", devices.size(), " devices.");
  for (const auto& [table, sharding] : plan) {
    TESSERA_CHECK_VALUE(sharding.type != ShardingType::kRowWise, "sharding.quant: table '", table,
                        "' is cut by rows; a processor sees whole bags.");
  }
}

KJTList ShardedQuantFeatureProcessedEmbeddingBagCollection::apply_feature_processor(
    const KJTList& features) const {
  TESSERA_CHECK_VALUE(features.size() == processors_.size(), "sharding.quant: there are features ",
                      "for ", features.size(), " devices, not for ", processors_.size(), ".");
  KJTList found;
  for (std::size_t d = 0; d < features.size(); ++d) {
    found.push_back(features[d].keys().empty() ? features[d]
                                               : processors_[d]->forward(features[d]));
  }
  return found;
}

KeyedTensor ShardedQuantFeatureProcessedEmbeddingBagCollection::forward(
    const KeyedJaggedTensor& features) {
  std::vector<KJTList> lists = input_dist(features);
  for (KJTList& list : lists) list = apply_feature_processor(list);
  return compute_and_output_dist(lists);
}

BaseQuantEmbeddingSharder::BaseQuantEmbeddingSharder(std::vector<std::string> shardable_params)
    : shardable_params_(std::move(shardable_params)) {}

BaseQuantEmbeddingSharder::~BaseQuantEmbeddingSharder() = default;

std::vector<ShardingType> BaseQuantEmbeddingSharder::sharding_types() const {
  return {ShardingType::kTableWise, ShardingType::kRowWise, ShardingType::kColumnWise};
}

std::vector<std::string> BaseQuantEmbeddingSharder::compute_kernels(at::DeviceType device) const {
  if (device != at::kCUDA) return {"quant"};
  return {"quant", "quant_uvm", "quant_uvm_caching"};
}

std::map<std::string, at::Tensor> BaseQuantEmbeddingSharder::shardable_parameters(
    const QuantEmbeddingBagCollection& module) const {
  std::map<std::string, at::Tensor> named;
  std::string left;
  for (const EmbeddingBagConfig& table : module.embedding_bag_configs()) {
    const bool is_named =
        shardable_params_.empty() || std::find(shardable_params_.begin(), shardable_params_.end(),
                                               table.name) != shardable_params_.end();
    if (is_named) {
      named.emplace(table.name, module.rows(table.name));
    } else {
      left += (left.empty() ? "'" : ", '") + table.name + "'";
    }
  }
  TESSERA_CHECK_VALUE(named.empty() || left.empty(), "sharding.quant: tables ", left,
                      " of the module are not named; name all or none.");
  return named;
}

std::map<std::string, std::int64_t> BaseQuantEmbeddingSharder::storage_usage(
    const at::Tensor& rows, at::DeviceType device) const {
  return {{device == at::kCUDA ? "hbm" : "ddr", rows.numel() * rows.element_size()}};
}

std::shared_ptr<ShardedQuantEmbeddingBagCollection> QuantEmbeddingBagCollectionSharder::shard(
    const QuantEmbeddingBagCollection& module, const ModulePlan& plan,
    std::vector<at::Device> devices) const {
  return std::make_shared<ShardedQuantEmbeddingBagCollection>(module, plan, std::move(devices));
}

std::vector<ShardingType> QuantFeatureProcessedEmbeddingBagCollectionSharder::sharding_types()
    const {
  return {ShardingType::kTableWise, ShardingType::kColumnWise};
}

std::vector<std::string> QuantFeatureProcessedEmbeddingBagCollectionSharder::compute_kernels(
    at::DeviceType) const {
  return {"quant"};
}

std::shared_ptr<ShardedQuantFeatureProcessedEmbeddingBagCollection>
QuantFeatureProcessedEmbeddingBagCollectionSharder::shard(
    const QuantEmbeddingBagCollection& module, const ModulePlan& plan,
    std::vector<at::Device> devices,
    std::vector<std::shared_ptr<embedding::FeatureProcessor>> processors) const {
  return std::make_shared<ShardedQuantFeatureProcessedEmbeddingBagCollection>(
      module, plan, std::move(devices), std::move(processors));
}

}  // namespace tessera::sharding
