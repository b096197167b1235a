// src/kernels/neighbour_sum.h — sums of rows along the edges of a graph.
//
// The edges of each row lie behind each other: entries first[i] to first[i + 1] belong to row i.
// Entry k comes from row column[k] and is edge number edge[k], the row of its weight. A weight is
// one number per edge (width 1), one per edge and column (width num_columns), or absent (weights
// null).
//
//   neighbour_sum:  for i in begin .. end - 1, for c:
//                     output[i][c] = sum over k in first[i] .. first[i + 1] - 1, in this order,
//                                    of input[column[k]][c] * weight(edge[k], c)
//
//   edge_product:   for i in begin .. end - 1, for k in first[i] .. first[i + 1] - 1:
//                     output[edge[k]][c] = a[column[k]][c] * b[i][c]     if width is num_columns
//                     output[edge[k]][0] = sum over c of the same        if width is 1

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"

namespace tessera::kernels {

/// Rows and their entries, as above.
struct EdgeRows {
  const std::int64_t* first;
  const std::int64_t* column;
  const std::int64_t* edge;
};

/// One instruction set's versions, for float32 and float64. Rows are contiguous; arrays do not
/// overlap.
template <typename T>
struct NeighbourSumKernels {
  void (*neighbour_sum)(const EdgeRows& rows, std::int64_t begin, std::int64_t end, const T* input,
                        std::int64_t num_columns, const T* weights, std::int64_t width, T* output);
  void (*edge_product)(const EdgeRows& rows, std::int64_t begin, std::int64_t end, const T* a,
                       const T* b, std::int64_t num_columns, std::int64_t width, T* output);
};

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
template <typename T>
const NeighbourSumKernels<T>* neighbour_sum_kernels(Isa isa) noexcept;

/// The versions for the instruction set of this process.
template <typename T>
const NeighbourSumKernels<T>& neighbour_sum_kernels() noexcept;

/// The plain loops that judge the others.
template <typename T>
const NeighbourSumKernels<T>& neighbour_sum_reference() noexcept;

}  // namespace tessera::kernels
