// tessera/embedding/feature_processor.h — what changes features before they are looked up.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/core/export.h"
#include "tessera/jagged/keyed_jagged_tensor.h"

namespace tessera::embedding {

/// Features and the number of ids that a bag of them may hold.
using LongestBags = std::vector<std::pair<std::string, std::int64_t>>;

/// Gives the features of a batch weights, which may depend on parameters of its own.
class TESSERA_API FeatureProcessor : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  ~FeatureProcessor() override;

  /// The same ids in the same bags, with weights. Not collective.
  virtual jagged::KeyedJaggedTensor forward(const jagged::KeyedJaggedTensor& features) = 0;
  /// Which bags it can process, so that ranks can refuse a batch before they send anything.
  virtual LongestBags longest_bags() const { return {}; }
};

/// Throws ValueError if a bag is longer than its feature's number, naming feature, sample and
/// length; and, if the features have weights, which are positions then, for a position outside.
/// Features that are not there are not checked. On CUDA the host waits.
TESSERA_API void check_positions(const jagged::KeyedJaggedTensor& features,
                                 const LongestBags& longest_bags);

}  // namespace tessera::embedding
