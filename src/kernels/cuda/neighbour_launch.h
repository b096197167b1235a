// src/kernels/cuda/neighbour_launch.h — starts the kernels of kernels/neighbour_sum.h on CUDA. No
// torch header, no CUDA header; pointers are device pointers and `stream` is a cudaStream_t. Each
// function returns a cudaError_t (0 is success) and waits for nothing.

#pragma once

#include <cstdint>

#include "kernels/neighbour_sum.h"

namespace tessera::kernels::cuda {

/// For T float and double; rows 0 to num_rows - 1.
template <typename T>
int neighbour_sum(const EdgeRows& rows, std::int64_t num_rows, const T* input,
                  std::int64_t num_columns, const T* weights, std::int64_t width, T* output,
                  void* stream);
template <typename T>
int edge_product(const EdgeRows& rows, std::int64_t num_rows, const T* a, const T* b,
                 std::int64_t num_columns, std::int64_t width, T* output, void* stream);

}  // namespace tessera::kernels::cuda
