// src/jagged/keyed_jagged_state.h — what a KeyedJaggedTensor holds.

#pragma once

#include <map>

#include "tessera/jagged/keyed_jagged_tensor.h"

namespace tessera::jagged {

struct KeyedJaggedTensor::State {
  std::vector<std::string> keys;
  at::Tensor values;
  at::Tensor weights;
  at::Tensor lengths;  // one of these two is computed on demand
  at::Tensor offsets;
  std::int64_t stride = 0;
  std::vector<std::int64_t> stride_per_key;
  std::vector<std::int64_t> lengths_offset_per_key;
  at::Tensor stride_per_key_per_rank;
  std::optional<InverseIndices> inverse_indices;
  std::map<std::string, std::size_t> index;
  // Computed on demand.
  std::optional<std::vector<std::int64_t>> length_per_key;
  std::optional<std::vector<std::int64_t>> offset_per_key;

  /// Everything a changed copy shares with this one.
  KeyedJaggedFields fields() const {
    return {.lengths = lengths,
            .offsets = offsets,
            .weights = weights,
            .stride = stride,
            .stride_per_key_per_rank = stride_per_key_per_rank,
            .inverse_indices = inverse_indices,
            .length_per_key = length_per_key};
  }
};

}  // namespace tessera::jagged
