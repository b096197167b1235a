// src/kernels/cuda/fused_task.cuh — what the two kernels of softmax_fused have in common: the task,
// the plan of a row, and sums that are joined.

#pragma once

#include <cstdint>

#include "kernels/cuda/logit_pack.cuh"
#include "kernels/softmax_gradient.h"
#include "kernels/softmax_statistics.h"
#include "kernels/token_rows.h"

namespace tessera::kernels::cuda {

struct FusedTask {
  SoftmaxStatisticsTask statistics;
  LossShape shape;
  const float* inverse;
  int num_packs;  // of a row; with edges, at most
  int slice;      // places of a row that each block of a cluster holds; not for single blocks
};

/// What a block knows of a row before it is read.
struct RowPlan {
  int64_t offset;
  int label_column;  // -1: none
  bool ignored;
};

__device__ __forceinline__ RowPlan plan_of(const SoftmaxStatisticsTask& task, int64_t row) {
  RowPlan plan;
  plan.offset = 0;
  plan.label_column = -1;
  plan.ignored = true;
  if (row >= task.rows.num_rows) return plan;
  const int64_t label = task.labels.ids[row];
  const int64_t column = label - task.labels.first_column;
  plan.offset = task.rows.offset(row);
  plan.ignored = label == task.labels.ignored;
  plan.label_column = !plan.ignored && column >= 0 && column < task.rows.num_columns
                          ? static_cast<int>(column)
                          : -1;
  return plan;
}

/// Where element `edge` outside whole packs lies in its row.
__device__ __forceinline__ int column_of_edge(const Cut& cut, int num_columns, int edge) {
  return edge < cut.head ? edge : num_columns - cut.tail + (edge - cut.head);
}

struct Part {
  float maximum;
  float sum;
};

__device__ __forceinline__ float center_of(float maximum) {
  return maximum == minus_infinity() ? 0.F : maximum;
}

__device__ __forceinline__ Part joined(Part a, Part b, float factor) {
  const float maximum = fmaxf(a.maximum, b.maximum), center = center_of(maximum);
  return {maximum, a.sum * exp2_fast(exponent_of(a.maximum, center, factor)) +
                       b.sum * exp2_fast(exponent_of(b.maximum, center, factor))};
}

__device__ __forceinline__ Part join_warp(Part part, float factor) {
  float maximum = part.maximum;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(~0U, maximum, offset));
  }
  float sum = part.sum * exp2_fast(exponent_of(part.maximum, center_of(maximum), factor));
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0U, sum, offset);
  return {maximum, sum};
}

/// What a row's gradient is made of: scale * weight * (p (1 + 2 z lse) - onehot).
struct Slope {
  float weight;  // of the label's one
  float by_sum;  // of the exponentials relative to the row's maximum
};

__device__ __forceinline__ Slope slope_of(const FusedTask& task, Part row, bool ignored,
                                          float inverse) {
  const float scale = task.statistics.scale;
  const float weight = ignored ? 0.F : scale * inverse;
  float on_softmax = weight;
  if (task.shape.z_loss != 0.0) {
    const float log_sum_exp = scale * row.maximum + __logf(row.sum);
    on_softmax += 2.F * static_cast<float>(task.shape.z_loss) * log_sum_exp * weight;
  }
  return {weight, ignored ? 0.F : __fdividef(on_softmax, row.sum)};
}

/// Whether one block can hold a row; then softmax_fused_rows takes the task.
bool fits_block(const LogitRows& rows);
cudaError_t softmax_fused_rows(const FusedTask& task, cudaStream_t stream);

}  // namespace tessera::kernels::cuda
