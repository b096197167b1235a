// src/serving/dense_plan.h — where the dense layers of a model lie in one block of numbers.
//
// The block of every version has the same layout, so a version is the address of its block.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/serving/package.h"

namespace tessera::serving {

/// A linear layer in the layout of its kernel.
struct PlacedLayer {
  std::string weight;  // names of its tensors
  std::string bias;    // empty: none
  std::int64_t num_inputs = 0;
  std::int64_t num_outputs = 0;
  bool has_relu = false;
  std::size_t weights_at = 0;  // in numbers, from the beginning of the block
  std::size_t bias_at = 0;

  void apply(const float* block, const float* input, std::int64_t stride, std::int64_t num_samples,
             float* output, std::int64_t output_stride) const;
};

struct DensePlan {
  explicit DensePlan(const ModelInfo& model);

  using Find = std::function<std::span<const float>(const std::string& tensor)>;
  /// Writes the layers of a model to `block`, which has `num_floats` numbers.
  void pack(const Find& find, float* block) const;

  std::vector<PlacedLayer> bottom;
  std::vector<PlacedLayer> down;  // of the cross layers
  std::vector<PlacedLayer> up;
  std::vector<PlacedLayer> top;
  std::size_t num_floats = 0;
  std::int64_t widest = 0;  // numbers of a sample between two layers
};

}  // namespace tessera::serving
