// tessera/jagged/jagged_tensor.h — a batch of bags of different lengths.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "tessera/core/export.h"

namespace tessera::jagged {

/// One feature of a batch: `values` [elements, ...], bag after bag, and how long each bag is.
///
/// Given are `lengths` [B], `offsets` [B + 1] or both, int32 or int64; the missing one is computed
/// when it is asked for. `weights`, if any, has one entry per element. Copies share their tensors.
/// Not safe to use from several threads at once, even for reading.
class TESSERA_API JaggedTensor {
 public:
  /// Throws ValueError if neither lengths nor offsets are given, or if the weights do not match
  /// the values, TypeError if lengths or offsets are not integers.
  explicit JaggedTensor(at::Tensor values, at::Tensor weights = {}, at::Tensor lengths = {},
                        at::Tensor offsets = {});

  /// Nothing: no bags, no elements.
  static JaggedTensor empty(bool is_weighted = false, const at::TensorOptions& values = {},
                            at::ScalarType weights_type = at::kFloat,
                            at::ScalarType lengths_type = at::kInt);
  /// One bag per tensor.
  static JaggedTensor from_dense(const std::vector<at::Tensor>& values,
                                 const std::vector<at::Tensor>& weights = {});
  /// The first `lengths[b]` elements of each row b of `values`, [B, N, ...].
  static JaggedTensor from_dense_lengths(const at::Tensor& values, const at::Tensor& lengths,
                                         const at::Tensor& weights = {});

  const at::Tensor& values() const noexcept { return values_; }
  /// Throws ValueError if there are none.
  const at::Tensor& weights() const;
  const at::Tensor& weights_or_none() const noexcept { return weights_; }
  const at::Tensor& lengths() const;
  const at::Tensor& lengths_or_none() const noexcept { return lengths_; }
  const at::Tensor& offsets() const;
  const at::Tensor& offsets_or_none() const noexcept { return offsets_; }
  c10::Device device() const { return values_.device(); }
  std::int64_t size_in_bytes() const;

  /// One tensor per bag; they are views.
  std::vector<at::Tensor> to_dense() const;
  /// The same of the weights; throws ValueError if there are none.
  std::vector<at::Tensor> to_dense_weights() const;
  /// [B, N, ...] with N the longest bag, or `desired_length`; longer bags are cut. Differentiable.
  at::Tensor to_padded_dense(std::optional<std::int64_t> desired_length = {},
                             double padding_value = 0.0) const;
  at::Tensor to_padded_dense_weights(std::optional<std::int64_t> desired_length = {},
                                     double padding_value = 0.0) const;

  JaggedTensor to(c10::Device device, bool non_blocking = false) const;
  JaggedTensor pin_memory() const;
  void record_stream(c10::Stream stream) const;

  /// The bags as nested lists.
  std::string str() const;

 private:
  at::Tensor values_;
  at::Tensor weights_;
  mutable at::Tensor lengths_;
  mutable at::Tensor offsets_;
};

/// Whether both hold the same bags and weights; floating point numbers may differ by rounding.
TESSERA_API bool jt_is_equal(const JaggedTensor& a, const JaggedTensor& b);

}  // namespace tessera::jagged
