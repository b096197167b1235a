// tessera/embedding/position_weighted.h — weights that depend on the place of an id in its bag.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/core/export.h"
#include "tessera/embedding/feature_processor.h"
#include "tessera/jagged/keyed_jagged_tensor.h"

namespace tessera::embedding {

/// A feature and the weights of its positions, [longest bag].
using PositionWeights = std::vector<std::pair<std::string, at::Tensor>>;

/// Returns one weight per element: position_weights[feature][position in the bag], and 1 for
/// features without. If the features have weights already, those are the positions (that is how ids
/// arrive that were spread over ranks). Gradients flow to the position weights.
///
/// Throws ValueError for a bag longer than its feature's weights, naming feature, sample and
/// length; on CUDA the host waits for that.
TESSERA_API at::Tensor position_weights(const jagged::KeyedJaggedTensor& features,
                                        const PositionWeights& position_weights);
/// The same of one feature; `name` is for the errors.
TESSERA_API at::Tensor position_weights(const jagged::JaggedTensor& feature,
                                        const at::Tensor& weights, bool has_positions = false,
                                        const std::string& name = "");

/// Position weights of one feature; the parameter `position_weight` starts as ones.
class TESSERA_API PositionWeightedModule : public torch::nn::Module {
 public:
  /// Throws ValueError for a length below 1.
  explicit PositionWeightedModule(std::int64_t max_feature_length, at::Device device = at::kCPU);
  /// The same bags with weights.
  jagged::JaggedTensor forward(const jagged::JaggedTensor& feature);
  void reset_parameters();

  at::Tensor position_weight;
};

/// Position weights of many features; parameters `position_weights.<feature>`.
class TESSERA_API GroupedPositionWeightedModule : public FeatureProcessor {
 public:
  /// Throws ValueError for a length below 1.
  explicit GroupedPositionWeightedModule(const LongestBags& max_feature_lengths,
                                         at::Device device = at::kCPU);
  /// The same features with weights; lengths, offsets and strides are kept.
  jagged::KeyedJaggedTensor forward(const jagged::KeyedJaggedTensor& features) override;
  LongestBags longest_bags() const override;
  void reset_parameters();

 private:
  PositionWeights weights_;
};

}  // namespace tessera::embedding
