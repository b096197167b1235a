// src/jagged/keyed_jagged_state.h — what a KeyedJaggedTensor holds.

#pragma once

#include <map>

#include "tessera/jagged/keyed_jagged_tensor.h"

namespace tessera::jagged {

/// Whether no length is negative, as far as is known without waiting for a device.
inline bool has_good_lengths(const KeyedJaggedTensor& features);

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

  // Note [Good lengths]
  // Every batch of sharded tables is asked whether a length is negative, and on a GPU the answer
  // waits for all that the device has been given before. So lengths are looked at where they lie in
  // host memory, before they are copied, and the copy carries a note. The note is about one tensor
  // as it was then: another one, or the same written to since, is looked at again.
  at::Tensor good_lengths;  // `lengths`, or `offsets` where those are all there is
  std::int64_t good_version = 0;

  const at::Tensor& told_lengths() const { return lengths.defined() ? lengths : offsets; }
  /// Looks at those in host memory, which somebody may have written to without a word to LibTorch.
  /// False: a length is negative, or nobody knows.
  TESSERA_API bool has_good_lengths();
  void note_good_lengths();

  static State& of(const KeyedJaggedTensor& features) { return *features.state_; }
  friend bool has_good_lengths(const KeyedJaggedTensor& features) {
    return of(features).has_good_lengths();
  }
};

}  // namespace tessera::jagged
