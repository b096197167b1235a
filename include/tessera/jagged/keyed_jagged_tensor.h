// tessera/jagged/keyed_jagged_tensor.h — the sparse half of a batch: many features, each a bag of
// ids per sample.
//
// Layout: key by key, inside a key sample by sample, inside a sample element by element. `lengths`
// has one entry per key and sample, in the same order.
//
// Variable batch: with `stride_per_key_per_rank` every key has a batch of its own (and inside a key
// the samples come rank by rank). `inverse_indices` then says which of a key's samples each sample
// of the full batch uses.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "tessera/core/export.h"
#include "tessera/jagged/jagged_tensor.h"

namespace tessera::jagged {

/// Names of features and [features, batch]: the row of a feature maps each sample of the full
/// batch to a sample of that feature.
using InverseIndices = std::pair<std::vector<std::string>, at::Tensor>;

/// What a KeyedJaggedTensor has besides keys and values. `lengths` or `offsets` must be given.
struct KeyedJaggedFields {
  at::Tensor lengths;
  at::Tensor offsets;
  at::Tensor weights;
  /// Samples per key; by default what the number of lengths says.
  std::optional<std::int64_t> stride;
  /// [keys, ranks], integers: makes the batch variable, even if all are equal.
  at::Tensor stride_per_key_per_rank;
  std::optional<InverseIndices> inverse_indices;
  /// Elements per key, if known; saves a pass over the lengths.
  std::optional<std::vector<std::int64_t>> length_per_key;
};

/// Immutable apart from what it computes on demand; copies share everything, computed things
/// included. Not safe to use from several threads at once, even for reading.
class TESSERA_API KeyedJaggedTensor {
 public:
  /// Throws TypeError for lengths or offsets that are not int32 or int64, ValueError for numbers of
  /// keys, lengths, strides, weights and values that do not fit together. Keys may repeat.
  KeyedJaggedTensor(std::vector<std::string> keys, at::Tensor values, KeyedJaggedFields fields);

  /// The same, and what is needed per key is computed now (on CUDA the host waits).
  static KeyedJaggedTensor from_lengths_sync(std::vector<std::string> keys, at::Tensor values,
                                             at::Tensor lengths, KeyedJaggedFields fields = {});
  static KeyedJaggedTensor from_offsets_sync(std::vector<std::string> keys, at::Tensor values,
                                             at::Tensor offsets, KeyedJaggedFields fields = {});
  /// Puts features together; the batch is variable if their batches differ. All weighted or none.
  static KeyedJaggedTensor from_jt_dict(
      const std::vector<std::pair<std::string, JaggedTensor>>& features);
  /// Puts keys after keys. All weighted or none, all of variable batch or none, equal strides
  /// otherwise; all with inverse indices or none. Throws ValueError.
  static KeyedJaggedTensor concat(const std::vector<KeyedJaggedTensor>& parts);
  static KeyedJaggedTensor empty(bool is_weighted = false, const at::TensorOptions& values = {},
                                 at::ScalarType weights_type = at::kFloat,
                                 at::ScalarType lengths_type = at::kInt);
  /// No keys, and the stride, types and device of `other`.
  static KeyedJaggedTensor empty_like(const KeyedJaggedTensor& other);

  const std::vector<std::string>& keys() const noexcept;
  const at::Tensor& values() const noexcept;
  const at::Tensor& weights() const;
  const at::Tensor& weights_or_none() const noexcept;
  const at::Tensor& lengths() const;
  const at::Tensor& lengths_or_none() const noexcept;
  const at::Tensor& offsets() const;
  const at::Tensor& offsets_or_none() const noexcept;
  c10::Device device() const;
  std::int64_t size_in_bytes() const;

  /// The batch size. Variable batch: that of the inverse indices, or the largest of all keys.
  std::int64_t stride() const;
  const std::vector<std::int64_t>& stride_per_key() const;
  bool variable_stride_per_key() const noexcept;
  /// [keys, ranks] int64 on the CPU; undefined unless the batch is variable.
  const at::Tensor& stride_per_key_per_rank() const noexcept;
  /// Throws ValueError if there are none.
  const InverseIndices& inverse_indices() const;
  const std::optional<InverseIndices>& inverse_indices_or_none() const noexcept;

  /// Elements of each key, and where each key begins in the values, [keys + 1].
  const std::vector<std::int64_t>& length_per_key() const;
  const std::vector<std::int64_t>& offset_per_key() const;
  /// Where each key begins in the lengths, [keys + 1].
  const std::vector<std::int64_t>& lengths_offset_per_key() const;
  bool is_synced() const noexcept;
  /// Computes length_per_key and offset_per_key now.
  const KeyedJaggedTensor& sync() const;
  /// Forgets them.
  const KeyedJaggedTensor& unsync() const;

  bool has_key(const std::string& key) const;
  /// The place of `key`, the last one if it repeats. Throws IndexError if there is none.
  std::size_t index_of(const std::string& key) const;
  /// One feature, as views; of the last place if the key repeats.
  JaggedTensor operator[](const std::string& key) const;
  JaggedTensor feature(std::size_t index) const;
  /// Key and feature, in order; a repeated key appears once, with its last place.
  std::vector<std::pair<std::string, JaggedTensor>> to_dict() const;

  /// Cuts by numbers of keys; views. A segment with all keys is this object itself; one of 0 keys
  /// keeps the stride, so that an empty rank still knows the batch size. Throws ValueError if the
  /// segments do not add up to at most the number of keys.
  std::vector<KeyedJaggedTensor> split(const std::vector<std::int64_t>& segments) const;
  /// Returns the keys `indices[0]`, `indices[1]`, …; repeats and subsets are allowed. Keeps the
  /// stride, drops the inverse indices. Values and weights are differentiable.
  KeyedJaggedTensor permute(const std::vector<std::int64_t>& indices) const;
  KeyedJaggedTensor flatten_lengths() const;
  /// The same ids with other weights (undefined: none), or with other values of equal size(0).
  KeyedJaggedTensor with_weights(at::Tensor weights) const;
  KeyedJaggedTensor with_values(at::Tensor values) const;

  KeyedJaggedTensor to(c10::Device device, bool non_blocking = false,
                       std::optional<at::ScalarType> weights_type = {}) const;
  KeyedJaggedTensor pin_memory() const;
  void record_stream(c10::Stream stream) const;
  std::string str() const;
  /// Whether both are the same object.
  bool is_same(const KeyedJaggedTensor& other) const noexcept { return state_ == other.state_; }

  /// What travels in an exchange of keys between ranks, in this order: lengths, values, strides
  /// (variable batch), weights (if any).
  std::vector<std::string> dist_labels() const;
  /// Rows of each tensor for each destination; destination d gets `key_splits[d]` keys.
  std::vector<std::vector<std::int64_t>> dist_splits(
      const std::vector<std::int64_t>& key_splits) const;
  std::vector<at::Tensor> dist_tensors() const;

  /// How the received tensors are put in order.
  struct DistFields {
    bool variable_stride_per_key = false;
    int num_workers = 1;
    /// The order of the received segments, rank by rank and key by key, that makes them key by key;
    /// per sample if the strides of the ranks differ. Undefined: they are in order.
    at::Tensor recat;
    /// Batch size of each rank; not read if the batch is variable.
    std::vector<std::int64_t> stride_per_rank;
    /// Ranks per step of the rank order of `recat`.
    int stagger = 1;
  };
  /// Builds what a rank holds after the exchange: per key, the samples of rank 0, then of rank 1, …
  /// (in the rank order of `recat`). The result is synced.
  static KeyedJaggedTensor dist_init(std::vector<std::string> keys,
                                     const std::vector<at::Tensor>& tensors,
                                     const DistFields& fields);

 private:
  struct State;
  explicit KeyedJaggedTensor(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

/// Whether both hold the same keys, in order, with the same bags and weights; floating point
/// numbers may differ by rounding.
TESSERA_API bool kjt_is_equal(const KeyedJaggedTensor& a, const KeyedJaggedTensor& b);

}  // namespace tessera::jagged
