#include "tessera/embedding/position_weighted.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "tessera/core/check.h"
#include "tessera/jagged/operators.h"

namespace tessera::embedding {

using jagged::JaggedTensor;
using jagged::KeyedJaggedTensor;

FeatureProcessor::~FeatureProcessor() = default;

namespace {

// Weights that are there already are positions.
void check_feature(const JaggedTensor& feature, std::int64_t max_length, bool has_positions,
                   const std::string& name) {
  if (feature.values().size(0) == 0) return;
  if (has_positions) {
    const at::Tensor positions = feature.weights().to(at::kLong);
    const auto largest = positions.max().item<std::int64_t>();
    TESSERA_CHECK_VALUE(largest < max_length && positions.min().item<std::int64_t>() >= 0,
                        "embed.position_weighted: feature '", name, "' has position ", largest,
                        ", but weights for ", max_length, " positions.");
    return;
  }
  const auto longest = feature.lengths().argmax().item<std::int64_t>();
  const auto length = feature.lengths()[longest].item<std::int64_t>();
  TESSERA_CHECK_VALUE(length <= max_length, "embed.position_weighted: feature '", name,
                      "', sample ", longest, " has ", length, " ids, but there are weights for ",
                      max_length, " positions.");
}

}  // namespace

void check_positions(const KeyedJaggedTensor& features, const LongestBags& longest_bags) {
  const bool has_positions = features.weights_or_none().defined();
  for (const auto& [name, length] : longest_bags) {
    if (!features.has_key(name)) continue;
    check_feature(features.feature(features.index_of(name)), length, has_positions, name);
  }
}

at::Tensor position_weights(const JaggedTensor& feature, const at::Tensor& weights,
                            bool has_positions, const std::string& name) {
  check_feature(feature, weights.numel(), has_positions, name);
  const std::int64_t count = feature.values().size(0);
  if (count == 0) return weights.narrow(0, 0, 0);
  return weights.index_select(0, has_positions ? feature.weights().to(at::kLong)
                                               : jagged::offsets_range(feature.offsets(), count));
}

at::Tensor position_weights(const KeyedJaggedTensor& features,
                            const PositionWeights& position_weights) {
  std::vector<at::Tensor> parts;
  const bool has_positions = features.weights_or_none().defined();
  for (std::size_t k = 0; k < features.keys().size(); ++k) {
    const auto& key = features.keys()[k];
    const auto found = std::find_if(position_weights.begin(), position_weights.end(),
                                    [&](const auto& entry) { return entry.first == key; });
    if (found == position_weights.end()) {
      parts.push_back(
          at::ones({features.length_per_key()[k]}, features.values().options().dtype(at::kFloat)));
    } else {
      parts.push_back(
          embedding::position_weights(features.feature(k), found->second, has_positions, key));
    }
  }
  return parts.empty() ? at::empty({0}, features.values().options().dtype(at::kFloat))
                       : at::cat(parts);
}

namespace {

at::Tensor new_weights(const std::string& name, std::int64_t max_length, at::Device device) {
  TESSERA_CHECK_VALUE(max_length > 0, "embed.position_weighted: feature '", name,
                      "' has a longest bag of ", max_length, ". It must be at least 1.");
  return at::ones({max_length}, at::TensorOptions(at::kFloat).device(device));
}

}  // namespace

PositionWeightedModule::PositionWeightedModule(std::int64_t max_feature_length, at::Device device)
    : torch::nn::Module("PositionWeightedModule"),
      position_weight(
          register_parameter("position_weight", new_weights("", max_feature_length, device))) {}

JaggedTensor PositionWeightedModule::forward(const JaggedTensor& feature) {
  return JaggedTensor(feature.values(), position_weights(feature, position_weight),
                      feature.lengths(), feature.offsets());
}

void PositionWeightedModule::reset_parameters() { position_weight.detach().fill_(1.0); }

GroupedPositionWeightedModule::GroupedPositionWeightedModule(const LongestBags& max_feature_lengths,
                                                             at::Device device)
    : FeatureProcessor("GroupedPositionWeightedModule") {
  const auto holder =
      register_module("position_weights", std::make_shared<torch::nn::Module>("PositionWeights"));
  for (const auto& [name, max_length] : max_feature_lengths) {
    weights_.emplace_back(name,
                          holder->register_parameter(name, new_weights(name, max_length, device)));
  }
}

KeyedJaggedTensor GroupedPositionWeightedModule::forward(const KeyedJaggedTensor& features) {
  return features.with_weights(position_weights(features, weights_));
}

LongestBags GroupedPositionWeightedModule::longest_bags() const {
  LongestBags lengths;
  for (const auto& [name, weight] : weights_) lengths.emplace_back(name, weight.numel());
  return lengths;
}

void GroupedPositionWeightedModule::reset_parameters() {
  for (auto& [name, weight] : weights_) weight.detach().fill_(1.0);
}

}  // namespace tessera::embedding
