// src/kernels/softmax_gradient.h — the gradient of anything made of a row's softmax, in one pass.
//
// The meaning, for every row (`ref/softmax_gradient.cpp` is this text as code); k is `scale`:
//
//   if the four coefficients are 0: every g_j = 0, and the logits are not read
//   d_j = k (x_j - maximum)
//   e_j = exp(d_j)                                           0 where x_j = -inf
//   g_j = e_j (softmax + weighted d_j) + uniform + (target if j is the label's column, else 0)
//   columns [rows.num_columns, num_written) are written with 0: they are padding
//
// Computed in float32 and rounded once. A term e_j = 0 counts 0 however large d_j is.

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"
#include "kernels/logit_rows.h"

namespace tessera::kernels {

/// One value per row. `weighted` may be null; the others may not.
struct SoftmaxCoefficients {
  const float* maximum = nullptr;
  const float* softmax = nullptr;
  const float* weighted = nullptr;
  const float* uniform = nullptr;
  const float* target = nullptr;
};

struct SoftmaxGradientTask {
  LogitRows rows;
  Labels labels;
  float scale = 1.0F;
  SoftmaxCoefficients coefficients;
  /// Where the gradient goes, in the logits' type: the logits themselves, or an array apart from
  /// them with the same row layout rules.
  void* gradient = nullptr;
  std::int64_t num_written = 0;
  std::int64_t inner_stride = 0;
  std::int64_t outer_stride = 0;
  Store store = Store::kCached;

  constexpr std::int64_t gradient_offset(std::int64_t row) const {
    return row / rows.inner_rows * outer_stride + row % rows.inner_rows * inner_stride;
  }
};

/// Writes the gradient of the rows [first, last).
void softmax_gradient(const SoftmaxGradientTask& task, std::int64_t first,
                      std::int64_t last) noexcept;

using SoftmaxGradientKernel = void (*)(const SoftmaxGradientTask& task, std::int64_t first,
                                       std::int64_t last);

/// The version for `isa`; null if this build does not have it. The CPU must support `isa`.
SoftmaxGradientKernel softmax_gradient_kernel(Isa isa) noexcept;

/// The plain loop that judges the others.
void softmax_gradient_reference(const SoftmaxGradientTask& task, std::int64_t first,
                                std::int64_t last);

}  // namespace tessera::kernels
