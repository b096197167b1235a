#include <algorithm>
#include <future>
#include <set>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/core/check.h"
#include "tessera/sharding/dist_data.h"
#include "tessera/sharding/sharded_quant_embedding_bag_collection.h"

namespace tessera::sharding {
namespace {

using embedding::PoolingType;
using embedding::QuantisedTables;
using embedding::QuantisedTableSpec;
using jagged::KeyedJaggedTensor;

void check_parts(const std::vector<at::Tensor>& parts, std::size_t world_size) {
  TESSERA_CHECK_VALUE(parts.size() == world_size, "sharding.all_to_one: there are ", parts.size(),
                      " parts, not ", world_size, ".");
}

void check_shape(const std::string& name, const at::Tensor& given, const at::Tensor& own) {
  TESSERA_CHECK_VALUE(given.sizes() == own.sizes(), "sharding.quant: '", name, "' is ",
                      given.sizes(), " in the state and ", own.sizes(), " here.");
}

const at::Tensor* find(const NamedRowBlocks& rows, const std::string& name) {
  for (const auto& [own, tensor] : rows) {
    if (own == name) return &tensor;
  }
  return nullptr;
}

// Checks all before it copies any.
void load_into(const NamedRowBlocks& here, const NamedRowBlocks& rows, bool strict) {
  for (const auto& [name, own] : here) {
    const at::Tensor* given = find(rows, name);
    TESSERA_CHECK_VALUE(given != nullptr || !strict, "sharding.quant: the state has no '", name,
                        "'.");
    if (given != nullptr) check_shape(name, *given, own);
  }
  for (const auto& [name, given] : rows) {
    TESSERA_CHECK_VALUE(find(here, name) != nullptr || !strict, "sharding.quant: there is no '",
                        name, "' here.");
  }
  for (const auto& [name, own] : here) {
    if (const at::Tensor* given = find(rows, name)) own.copy_(*given);
  }
}

}  // namespace

KJTOneToAll::KJTOneToAll(Sizes splits, std::vector<at::Device> devices)
    : splits_(std::move(splits)), devices_(std::move(devices)) {
  TESSERA_CHECK_VALUE(splits_.size() == devices_.size(), "sharding.kjt_one_to_all: there are ",
                      splits_.size(), " parts for ", devices_.size(), " devices.");
}

KJTList KJTOneToAll::forward(const KeyedJaggedTensor& features) const {
  return kjt_one_to_all(features, splits_, devices_);
}

EmbeddingsAllToOne::EmbeddingsAllToOne(at::Device device, std::size_t world_size,
                                       std::int64_t cat_dim)
    : device_(device), world_size_(world_size), cat_dim_(cat_dim) {}

at::Tensor EmbeddingsAllToOne::forward(const std::vector<at::Tensor>& parts) const {
  check_parts(parts, world_size_);
  return embeddings_all_to_one(parts, device_, cat_dim_);
}

EmbeddingsAllToOneReduce::EmbeddingsAllToOneReduce(at::Device device, std::size_t world_size)
    : device_(device), world_size_(world_size) {}

at::Tensor EmbeddingsAllToOneReduce::forward(const std::vector<at::Tensor>& parts) const {
  check_parts(parts, world_size_);
  return embeddings_all_to_one_reduce(parts, device_);
}

SeqEmbeddingsAllToOne::SeqEmbeddingsAllToOne(at::Device device, std::size_t world_size)
    : device_(device), world_size_(world_size) {}

std::vector<at::Tensor> SeqEmbeddingsAllToOne::forward(const std::vector<at::Tensor>& parts) const {
  check_parts(parts, world_size_);
  std::vector<at::Tensor> moved;
  for (const at::Tensor& part : parts) moved.push_back(part.to(device_, part.scalar_type()));
  return moved;
}

std::vector<std::string> GroupedQuantConfig::feature_names() const {
  std::vector<std::string> names;
  for (const QuantisedTableSpec& table : tables) {
    names.insert(names.end(), table.features.begin(), table.features.end());
  }
  return names;
}

MetaInferGroupedLookup::MetaInferGroupedLookup(
    std::vector<GroupedQuantConfig> configs, bool is_pooled, const embedding::QuantOptions& options,
    std::shared_ptr<embedding::FeatureProcessor> processor)
    : configs_(std::move(configs)), options_(options), processor_(std::move(processor)) {
  TESSERA_CHECK_VALUE(at::isFloatingType(options.output_type),
                      "sharding.quant: outputs are floating point, not ", options.output_type, ".");
  for (const GroupedQuantConfig& config : configs_) {
    TESSERA_CHECK_VALUE(!is_pooled || config.pooling != PoolingType::kNone,
                        "sharding.quant: a group of a pooled lookup has no pooling.");
    tbes_.push_back(std::make_shared<QuantisedTables>(
        config.tables, is_pooled ? config.pooling : PoolingType::kNone, options.row_alignment,
        options.device));
  }
}

NamedRowBlocks MetaInferGroupedLookup::named_rows() const {
  NamedRowBlocks named;
  for (const auto& tbe : tbes_) {
    for (std::size_t t = 0; t < tbe->tables().size(); ++t) {
      named.emplace_back(tbe->tables()[t].name + ".weight", tbe->rows(t));
    }
  }
  return named;
}

void MetaInferGroupedLookup::load_rows(const NamedRowBlocks& rows, bool strict) {
  load_into(named_rows(), rows, strict);
}

at::Tensor MetaInferGroupedLookup::look_up(const KeyedJaggedTensor& features, std::int64_t dim) {
  if (tbes_.empty()) {
    return at::empty({0}, at::TensorOptions(options_.output_type).device(options_.device));
  }
  Sizes splits;
  for (const GroupedQuantConfig& config : configs_) {
    splits.push_back(static_cast<std::int64_t>(config.feature_names().size()));
  }
  const KJTList own = features.to(options_.device).split(splits);
  std::vector<at::Tensor> found;
  for (std::size_t g = 0; g < tbes_.size(); ++g) {
    const GroupedQuantConfig& config = configs_[g];
    const KeyedJaggedTensor bags =
        config.has_feature_processor && processor_ ? processor_->forward(own[g]) : own[g];
    const bool is_weighted = config.is_weighted || config.has_feature_processor;
    // A part of a split batch may begin anywhere in the values; its own offsets begin at 0.
    found.push_back(
        tbes_[g]
            ->forward(bags.values(), bags.offsets(),
                      is_weighted ? std::optional(bags.weights().detach()) : std::nullopt)
            .to(options_.output_type));
  }
  return found.size() == 1 ? found[0] : at::cat(found, dim);
}

MetaInferGroupedPooledEmbeddingsLookup::MetaInferGroupedPooledEmbeddingsLookup(
    std::vector<GroupedQuantConfig> configs, const embedding::QuantOptions& options,
    std::shared_ptr<embedding::FeatureProcessor> processor)
    : MetaInferGroupedLookup(std::move(configs), true, options, std::move(processor)) {}

at::Tensor MetaInferGroupedPooledEmbeddingsLookup::forward(const KeyedJaggedTensor& features) {
  return look_up(features, 1);
}

MetaInferGroupedEmbeddingsLookup::MetaInferGroupedEmbeddingsLookup(
    std::vector<GroupedQuantConfig> configs, const embedding::QuantOptions& options)
    : MetaInferGroupedLookup(std::move(configs), false, options, nullptr) {}

at::Tensor MetaInferGroupedEmbeddingsLookup::forward(const KeyedJaggedTensor& features) {
  return look_up(features, 0);
}

std::vector<at::Tensor> InferGroupedLookupMixin::forward(const KJTList& features) {
  TESSERA_CHECK_VALUE(features.size() == lookups_.size(), "sharding.quant: there are features for ",
                      features.size(), " devices, not for ", lookups_.size(), ".");
  std::set<std::int64_t> gpus;
  for (const auto& lookup : lookups_) {
    if (lookup && lookup->device().is_cuda()) gpus.insert(lookup->device().index());
  }
  std::vector<at::Tensor> found;
  if (gpus.size() < 2) {
    for (std::size_t i = 0; i < lookups_.size(); ++i) {
      if (lookups_[i]) found.push_back(lookups_[i]->forward(features[i]));
    }
    return found;
  }
  // A lookup waits for its device, which says whether all ids are rows: a thread for each.
  const bool is_inference = c10::InferenceMode::is_enabled();
  std::vector<std::future<at::Tensor>> begun;
  for (std::size_t i = 0; i < lookups_.size(); ++i) {
    if (!lookups_[i]) continue;
    const at::Device device = lookups_[i]->device();
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    begun.push_back(std::async(std::launch::async, [&, i, stream] {
      const c10::InferenceMode mode(is_inference);
      const c10::StreamGuard guard(stream);
      return lookups_[i]->forward(features[i]);
    }));
  }
  for (auto& one : begun) one.wait();  // also of one that fails, so that nothing is used any more
  for (auto& one : begun) found.push_back(one.get());
  return found;
}

NamedRowBlocks InferGroupedLookupMixin::named_rows() const {
  NamedRowBlocks named;
  for (const auto& lookup : lookups_) {
    if (!lookup) continue;
    const NamedRowBlocks own = lookup->named_rows();
    named.insert(named.end(), own.begin(), own.end());
  }
  return named;
}

void InferGroupedLookupMixin::load_rows(const NamedRowBlocks& rows, bool strict) {
  load_into(named_rows(), rows, strict);
}

namespace {

template <typename Lookup>
std::vector<std::shared_ptr<MetaInferGroupedLookup>> lookups_of(
    const std::vector<std::vector<GroupedQuantConfig>>& configs,
    const std::vector<at::Device>& devices, embedding::QuantOptions options) {
  TESSERA_CHECK_VALUE(configs.size() == devices.size(), "sharding.quant: there are groups for ",
                      configs.size(), " devices, not for ", devices.size(), ".");
  std::vector<std::shared_ptr<MetaInferGroupedLookup>> lookups;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    options.device = devices[i];
    lookups.push_back(configs[i].empty() ? nullptr : std::make_shared<Lookup>(configs[i], options));
  }
  return lookups;
}

}  // namespace

InferGroupedPooledEmbeddingsLookup::InferGroupedPooledEmbeddingsLookup(
    const std::vector<std::vector<GroupedQuantConfig>>& configs_per_device,
    const std::vector<at::Device>& devices, embedding::QuantOptions options) {
  lookups_ =
      lookups_of<MetaInferGroupedPooledEmbeddingsLookup>(configs_per_device, devices, options);
}

InferGroupedEmbeddingsLookup::InferGroupedEmbeddingsLookup(
    const std::vector<std::vector<GroupedQuantConfig>>& configs_per_device,
    const std::vector<at::Device>& devices, embedding::QuantOptions options) {
  lookups_ = lookups_of<MetaInferGroupedEmbeddingsLookup>(configs_per_device, devices, options);
}

}  // namespace tessera::sharding
