// src/kernels/combine.h — blocks of rows, laid side by side or summed into the rows of a matrix.
//
// A block is [samples, columns], contiguous, and belongs to columns column .. column + columns - 1
// of the matrix. Row i of the matrix reads sample s(i) = sample[i], or i if `sample` is null, times
// factor[s(i)], or 1 if `factor` is null.
//
//   combine:  for row i in begin .. end - 1, for each block, in order:
//               output[i][column + c]  = data[s(i)][c] * factor      if not is_added
//               output[i][column + c] += data[s(i)][c] * factor      if is_added
//
//   spread:   for row i in begin .. end - 1:
//               data[i][c]     = gradient[i][column + c] * factor[i]     without `sample`
//               data[s(i)][c] += gradient[i][column + c] * factor[s(i)]  with it; data starts as 0

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"

namespace tessera::kernels {

struct RowBlock {
  float* data = nullptr;  // combine does not write it
  std::int64_t columns = 0;
  std::int64_t column = 0;
  const std::int64_t* sample = nullptr;
  const float* factor = nullptr;
  bool is_added = false;
};

struct CombineKernels {
  /// Rows of `output` are `stride` numbers apart.
  void (*combine)(const RowBlock* blocks, std::int64_t num_blocks, std::int64_t begin,
                  std::int64_t end, std::int64_t stride, float* output);
  /// Rows of `gradient` are `stride` numbers apart.
  void (*spread)(const RowBlock& block, std::int64_t begin, std::int64_t end, const float* gradient,
                 std::int64_t stride);
};

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
const CombineKernels* combine_kernels(Isa isa) noexcept;
/// The versions for the instruction set of this process.
const CombineKernels& combine_kernels() noexcept;
/// The plain loops that judge the others.
const CombineKernels& combine_reference() noexcept;

}  // namespace tessera::kernels
