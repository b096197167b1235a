// src/graph_parallel/device.h — sums along edges by CUDA kernels of our own, where this build has
// them. The host waits for nothing.

#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/neighbour_sum.h"

namespace tessera::graph_parallel::detail {

/// Whether `tensor` is one that the functions below take: float32 or float64 on CUDA.
bool has_kernels_for(const at::Tensor& tensor) noexcept;

/// As kernels/neighbour_sum.h, into `output`. Tensors are contiguous; `weights` may be undefined;
/// `rows` point into the device's memory.
void device_neighbour_sum(const kernels::EdgeRows& rows, const at::Tensor& input,
                          const at::Tensor& weights, const at::Tensor& output);
void device_edge_product(const kernels::EdgeRows& rows, const at::Tensor& a, const at::Tensor& b,
                         const at::Tensor& output);

}  // namespace tessera::graph_parallel::detail
