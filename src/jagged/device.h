// src/jagged/device.h — the operators of operators.h by CUDA kernels of our own, where this build
// has them. The host waits for nothing.

#pragma once

#include "tessera/jagged/operators.h"

namespace tessera::jagged::detail {

/// Whether `tensor` is one that the functions below take.
bool has_kernels_for(const at::Tensor& tensor) noexcept;

/// Running sums with 0 in front, in `type` (int32 or int64).
at::Tensor device_offsets(const at::Tensor& lengths, at::ScalarType type);

/// int64: the sum of each row of [rows, columns].
at::Tensor device_row_sums(const at::Tensor& lengths);

/// The segments `order[0]`, … of `data`. `sizes` and `order` are int64, on the device; the result
/// has `num_rows` rows. Not differentiable.
at::Tensor device_copy_segments(const at::Tensor& data, const at::Tensor& sizes,
                                const at::Tensor& order, std::int64_t num_rows);

/// The arguments have been checked.
Bucketized device_bucketize(const at::Tensor& lengths, const at::Tensor& values,
                            const at::Tensor& weights, const BucketizeOptions& options);

}  // namespace tessera::jagged::detail
