// src/kernels/softmax_fused.h — statistics and the gradient of the summed loss, row by row.
//
// For one rank, where nothing is exchanged in between: each row is read once, its exponentials are
// kept in a workspace, and its gradient is written over it. The meaning (k is `scale`):
//
//   maximum, sum, target of the row as in softmax_statistics.h
//   weight = 0 if the label is the ignored one, else `weight`
//   lse    = k maximum + log(sum)
//   g_j    = k weight (exp(k (x_j - maximum)) / sum * (1 + 2 z_loss lse) - (1 if j is the label))
//
// Label smoothing is not offered: it needs the sum of the logits as well.

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"
#include "kernels/softmax_statistics.h"

namespace tessera::kernels {

struct SoftmaxFusedTask {
  /// rows.data is written. Of `out`, maximum, sum and target are wanted.
  SoftmaxStatisticsTask statistics;
  double z_loss = 0.0;
  float weight = 1.0F;
};

/// Floats of workspace that rows of so many columns need; one workspace per thread.
std::int64_t softmax_fused_workspace(std::int64_t num_columns) noexcept;

/// Treats the rows [first, last). `workspace` is aligned to 64 bytes.
void softmax_fused(const SoftmaxFusedTask& task, std::int64_t first, std::int64_t last,
                   float* workspace) noexcept;

using SoftmaxFusedKernel = void (*)(const SoftmaxFusedTask& task, std::int64_t first,
                                    std::int64_t last, float* workspace);

/// The version for `isa`; null if this build does not have it. The CPU must support `isa`.
SoftmaxFusedKernel softmax_fused_kernel(Isa isa) noexcept;

/// The plain loop that judges the others.
void softmax_fused_reference(const SoftmaxFusedTask& task, std::int64_t first, std::int64_t last,
                             float* workspace);

}  // namespace tessera::kernels
