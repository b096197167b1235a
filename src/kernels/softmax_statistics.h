// src/kernels/softmax_statistics.h — what a softmax needs to know of a row, in one read of it.
//
// The meaning, for every row (`ref/softmax_statistics.cpp` is this text as code); k is `scale`, the
// inverse of the temperature, and x_j are the logits as given:
//
//   if skip_ignored and the row's label is the ignored one: maximum = -inf, the rest 0
//   maximum      = max_j x_j                                -inf for an empty row
//   sum          = sum_j exp(k (x_j - maximum))             0 where x_j = -inf; NaN if any x_j is
//   target       = x_y if this rank holds the label y, else -inf
//   total        = sum_j x_j
//   weighted     = sum_j exp(k (x_j - maximum)) k (x_j - maximum)   a term of weight 0 counts 0
//   best         = id of the first column that holds the maximum
//
// Statistics of the parts of a row merge into those of the row; see softmax_merge.h.

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"
#include "kernels/logit_rows.h"

namespace tessera::kernels {

/// One value per row for each of the statistics; a null pointer means it is not wanted. `maximum`
/// and `sum` are always written.
struct SoftmaxStatistics {
  float* maximum = nullptr;
  float* sum = nullptr;
  float* target = nullptr;
  float* total = nullptr;
  float* weighted = nullptr;
  std::int32_t* best = nullptr;
};

struct SoftmaxStatisticsTask {
  LogitRows rows;
  Labels labels;
  float scale = 1.0F;
  bool skip_ignored = false;
  SoftmaxStatistics out;
};

/// Writes the statistics of the rows [first, last).
void softmax_statistics(const SoftmaxStatisticsTask& task, std::int64_t first,
                        std::int64_t last) noexcept;

using SoftmaxStatisticsKernel = void (*)(const SoftmaxStatisticsTask& task, std::int64_t first,
                                         std::int64_t last);

/// The version for `isa`; null if this build does not have it. The CPU must support `isa`.
SoftmaxStatisticsKernel softmax_statistics_kernel(Isa isa) noexcept;

/// The plain loop that judges the others.
void softmax_statistics_reference(const SoftmaxStatisticsTask& task, std::int64_t first,
                                  std::int64_t last);

}  // namespace tessera::kernels
