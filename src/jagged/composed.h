// src/jagged/composed.h — the operators of operators.h out of LibTorch's own.
//
// They run on every device, and where gradients are recorded; on the CPU they judge the kernels.

#pragma once

#include "tessera/core/export.h"
#include "tessera/jagged/operators.h"

namespace tessera::jagged::detail {

/// The element of `data` that each element of the permuted result comes from. `sizes` and `order`
/// are int64 on one device.
TESSERA_API at::Tensor gather_index(const at::Tensor& sizes, const at::Tensor& order);

TESSERA_API Bucketized bucketize_composed(const at::Tensor& lengths, const at::Tensor& values,
                                          const at::Tensor& weights,
                                          const BucketizeOptions& options);

TESSERA_API at::Tensor to_padded_composed(const at::Tensor& values, const at::Tensor& offsets,
                                          std::int64_t max_length, double padding_value);
TESSERA_API at::Tensor from_padded_composed(const at::Tensor& dense, const at::Tensor& offsets,
                                            std::int64_t num_values);

/// Integers for what has no elements, whatever its type: torch.tensor([]) is float.
inline at::Tensor integers_if_empty(at::Tensor tensor) {
  const bool is_typed = !tensor.defined() || tensor.numel() > 0 || !tensor.is_floating_point();
  return is_typed ? tensor : tensor.to(at::kInt);
}

/// Throws TypeError unless `tensor` is int32 or int64.
void check_integers(const at::Tensor& tensor, const char* operation, const char* name);

/// Of its elements; none if it is undefined.
inline std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

}  // namespace tessera::jagged::detail
