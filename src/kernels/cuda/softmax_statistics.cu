// Softmax statistics on CUDA: one block per row, one read of it.
//
// Every thread has four packs of 16 bytes and the next four already on their way, and at most 64
// registers, so that 1024 threads share a multiprocessor: every other arrangement tried was slower.
// The running maximum moves once per four packs. Rows are shared by 128 threads, very long ones by
// 256: few rows make few blocks, and the last ones would leave the GPU half empty.

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/logit_pack.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kPacks = 4;
/// Rows of more packs get 256 threads.
constexpr std::int64_t kLongRow = 24576;

/// Sums so far, relative to `maximum`. `weighted` is in units of log2(e): it sums e * exponent.
struct Running {
  float maximum;
  float sum;
  float total;
  float weighted;
  int best;  // first element of the batch in which the maximum was met
};

__device__ __forceinline__ Running nothing() {
  return {minus_infinity(), 0.F, 0.F, 0.F, 0x7fffffff};
}

__device__ __forceinline__ float center_of(float maximum) {
  return maximum == minus_infinity() ? 0.F : maximum;
}

/// Below this an exponential is 0 in float32; it keeps 0 * -inf out of the weighted sum.
constexpr float kSmallest = -200.F;

/// The larger one; NaN if one is.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

template <bool kWeighted>
__device__ __forceinline__ void move_maximum(Running& r, float maximum, float factor) {
  const float shift = fmaxf(exponent_of(r.maximum, center_of(maximum), factor), kSmallest);
  const float f = exp2_fast(shift);
  if constexpr (kWeighted) r.weighted = f * fmaf(shift, r.sum, r.weighted);
  r.sum *= f;
  r.maximum = maximum;
}

/// Of a few packs, relative to a centre.
struct Sums {
  float sum;
  float weighted;
  float total;
};

// Note [Exponents in one operation]
// k (x - center) log2(e) takes a subtraction and a product. As fma(x, factor, -c) with c the
// rounded product of center and factor, it takes one operation and is rounded once, at its own
// size. c is not quite center * factor, but by the same `rest` for every element, which the fma
// gives exactly: the sums are put right once per batch. Two things do not survive it, and such a
// batch is summed again the careful way (kCareful), read again because its registers are taken:
// a centre so large that `rest` is not small, and -inf or finite masks in the weighted sum, where
// 0 * -inf makes NaN.

/// Up to here `rest` is at most 1/16.
constexpr float kLargestShift = 1048576.F;

template <typename T, bool kTotal, bool kWeighted, bool kLast, bool kCareful>
__device__ __forceinline__ Sums sum_packs(const uint4 (&packs)[kPacks], uint32_t valid,
                                          float center, float factor) {
  using F = Form<T>;
  const float shift = -(center * factor);
  float s0 = 0.F, s1 = 0.F, w0 = 0.F, w1 = 0.F, t0 = 0.F, t1 = 0.F;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    if (kLast && ((valid >> u) & 1U) == 0) continue;
#pragma unroll
    for (int i = 0; i < F::kCount; i += 2) {
      const float x0 = F::get(packs[u], i), x1 = F::get(packs[u], i + 1);
      float d0, d1;
      if constexpr (kCareful) {
        d0 = larger_or_nan(exponent_of(x0, center, factor), kSmallest);
        d1 = larger_or_nan(exponent_of(x1, center, factor), kSmallest);
      } else {
        d0 = fmaf(x0, factor, shift);
        d1 = fmaf(x1, factor, shift);
      }
      const float e0 = exp2_fast(d0), e1 = exp2_fast(d1);
      s0 += e0;
      s1 += e1;
      if constexpr (kWeighted) {
        w0 = fmaf(e0, d0, w0);
        w1 = fmaf(e1, d1, w1);
      }
      if constexpr (kTotal) {
        t0 += x0;
        t1 += x1;
      }
    }
  }
  Sums sums{s0 + s1, w0 + w1, t0 + t1};
  if constexpr (!kCareful) {
    const float rest = -fmaf(center, factor, shift);
    const float f = exp2_fast(rest);
    if constexpr (kWeighted) sums.weighted = f * fmaf(rest, sums.sum, sums.weighted);
    sums.sum *= f;
  }
  return sums;
}

/// Adds the packs from `first` on, of which `now` holds copies. kLast: only those in `valid`.
template <typename T, int kThreads, bool kTotal, bool kWeighted, bool kBest, bool kLast>
__device__ __forceinline__ void add_packs(const uint4 (&now)[kPacks], const uint4* packs, int first,
                                          uint32_t valid, float factor, Running& r) {
  using F = Form<T>;
  float top = F::largest(now[0]);
#pragma unroll
  for (int u = 1; u < kPacks; ++u) top = fmaxf(top, F::largest(now[u]));
  if constexpr (kBest) {
    if (top > r.maximum) r.best = first;
  }
  move_maximum<kWeighted>(r, fmaxf(r.maximum, top), factor);
  const float center = center_of(r.maximum);
  // See Note [Exponents in one operation].
  Sums sums = sum_packs<T, kTotal, kWeighted, kLast, false>(now, valid, center, factor);
  bool again = !(fabsf(center * factor) < kLargestShift);
  if constexpr (kWeighted) again = again || sums.weighted != sums.weighted;
  if (again) {
    uint4 copies[kPacks];
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      copies[u] = padding_pack<T>();
      if (!kLast || ((valid >> u) & 1U) != 0) copies[u] = packs[first + u * kThreads];
    }
    sums = sum_packs<T, kTotal, kWeighted, kLast, true>(copies, valid, center, factor);
  }
  r.sum += sums.sum;
  if constexpr (kWeighted) r.weighted += sums.weighted;
  if constexpr (kTotal) r.total += sums.total;
}

/// Joins the lanes: first the maximum, so that each lane moves to it once, then plain sums.
template <bool kTotal, bool kWeighted>
__device__ __forceinline__ Running join_warp(Running r, float factor) {
  float maximum = r.maximum;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(~0U, maximum, offset));
  }
  move_maximum<kWeighted>(r, maximum, factor);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    r.sum += __shfl_xor_sync(~0U, r.sum, offset);
    if constexpr (kTotal) r.total += __shfl_xor_sync(~0U, r.total, offset);
    if constexpr (kWeighted) r.weighted += __shfl_xor_sync(~0U, r.weighted, offset);
  }
  return r;
}

/// Joins the warps' results, which do not depend on each other, in a fixed order.
template <bool kTotal, bool kWeighted, int kWarps>
__device__ __forceinline__ Running join_warps(const Running (&of_warp)[kWarps], float factor) {
  float maximum = of_warp[0].maximum;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) maximum = fmaxf(maximum, of_warp[w].maximum);
  Running all{maximum, 0.F, 0.F, 0.F, 0};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    Running r = of_warp[w];
    move_maximum<kWeighted>(r, maximum, factor);
    all.sum += r.sum;
    if constexpr (kTotal) all.total += r.total;
    if constexpr (kWeighted) all.weighted += r.weighted;
  }
  return all;
}

/// The smallest column from the thread's recorded batch on that holds the row's maximum.
template <typename T, int kThreads>
__device__ int exact_best(const T* row, const Cut& cut, int num_columns, int first, float maximum) {
  constexpr int kCount = Form<T>::kCount;
  if (first < 0) return -first - 1;  // a single element
  for (int u = 0; u < kPacks; ++u) {
    const int pack = first + u * kThreads;
    if (pack >= cut.num_packs) break;
    for (int i = 0; i < kCount; ++i) {
      const int column = cut.head + pack * kCount + i;
      if (Form<T>::widen(row[column]) == maximum) return column;
    }
  }
  return num_columns;
}

/// A row without a label that counts.
__device__ __forceinline__ void write_nothing(const SoftmaxStatisticsTask& task, int64_t row) {
  const SoftmaxStatistics& out = task.out;
  out.maximum[row] = minus_infinity();
  out.sum[row] = 0.F;
  if (out.target != nullptr) out.target[row] = minus_infinity();
  if (out.total != nullptr) out.total[row] = 0.F;
  if (out.weighted != nullptr) out.weighted[row] = 0.F;
  if (out.best != nullptr) out.best[row] = static_cast<int32_t>(task.labels.first_column);
}

template <typename T, int kThreads, bool kTotal, bool kWeighted, bool kBest>
__global__ void __launch_bounds__(kThreads, (kBest ? 768 : 1024) / kThreads)
    statistics_kernel(SoftmaxStatisticsTask task) {
  constexpr int kWarps = kThreads / 32;
  __shared__ Running of_warp[kWarps];
  __shared__ int shared_best[kWarps];
  let_next_start();
  const int64_t row = blockIdx.x;
  const int thread = threadIdx.x;
  const Labels& labels = task.labels;
  const int num_columns = static_cast<int>(task.rows.num_columns);
  const T* x = static_cast<const T*>(task.rows.data) + task.rows.offset(row);
  const float factor = task.scale * kLog2E;
  const Cut cut = cut_row(x, num_columns);
  const uint4* packs = reinterpret_cast<const uint4*>(x + cut.head);

  // The first packs set off before the label is there: short rows would wait for it.
  constexpr int kStep = kThreads * kPacks;
  uint4 now[kPacks], next[kPacks];
  int i = thread;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    now[u] = padding_pack<T>();
    if (i + u * kThreads < cut.num_packs) now[u] = packs[i + u * kThreads];
  }
  const int64_t label = labels.ids != nullptr ? labels.ids[row] : -1;
  if (task.skip_ignored && labels.ids != nullptr && label == labels.ignored) {
    if (thread == 0) write_nothing(task, row);
    return;
  }
  if (thread == 0 && task.out.target != nullptr) {
    const int64_t column = label - labels.first_column;
    const bool owned = labels.ids != nullptr && column >= 0 && column < num_columns;
    task.out.target[row] = owned ? Form<T>::widen(x[column]) : minus_infinity();
  }

  Running r = nothing();
  // The few elements outside whole packs start the sums of the first threads.
  if (thread < cut.head + cut.tail) {
    const int column = thread < cut.head ? thread : num_columns - cut.tail + (thread - cut.head);
    const float value = Form<T>::widen(x[column]);
    r.maximum = value == value ? value : minus_infinity();
    r.sum = exp2_fast(exponent_of(value, center_of(r.maximum), factor));
    r.total = value;
    r.best = -column - 1;
  }

  const int num_full = cut.num_packs / kStep;
  for (int step = 0; step < num_full; ++step) {
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      next[u] = padding_pack<T>();
      if (i + kStep + u * kThreads < cut.num_packs) next[u] = packs[i + kStep + u * kThreads];
    }
    add_packs<T, kThreads, kTotal, kWeighted, kBest, false>(now, packs, i, ~0U, factor, r);
    i += kStep;
#pragma unroll
    for (int u = 0; u < kPacks; ++u) now[u] = next[u];
  }
  uint32_t valid = 0;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) valid |= i + u * kThreads < cut.num_packs ? 1U << u : 0U;
  if (valid != 0) {
    add_packs<T, kThreads, kTotal, kWeighted, kBest, true>(now, packs, i, valid, factor, r);
  }

  int own_best = 0x7fffffff;
  const float own_maximum = r.maximum;
  if constexpr (kBest) own_best = r.best;
  r = join_warp<kTotal, kWeighted>(r, factor);
  if ((thread & 31) == 0) of_warp[thread / 32] = r;
  __syncthreads();
  if (!kBest && thread >= 32) return;
  const Running all = join_warps<kTotal, kWeighted>(of_warp, factor);
  if constexpr (kBest) {
    int best = 0x7fffffff;
    if (own_best != 0x7fffffff && own_maximum == all.maximum) {
      best = exact_best<T, kThreads>(x, cut, num_columns, own_best, all.maximum);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      best = min(best, __shfl_xor_sync(~0U, best, offset));
    }
    if ((thread & 31) == 0) shared_best[thread / 32] = best;
    __syncthreads();
    if (thread == 0) {
      for (int w = 1; w < kWarps; ++w) best = min(best, shared_best[w]);
      if (best >= num_columns) best = 0;
      task.out.best[row] = static_cast<int32_t>(labels.first_column) + best;
    }
  }
  if (thread != 0) return;
  task.out.maximum[row] = all.maximum;
  task.out.sum[row] = all.sum;
  if (task.out.total != nullptr) task.out.total[row] = all.total;
  if (task.out.weighted != nullptr) task.out.weighted[row] = all.weighted / kLog2E;
}

template <typename T, int kThreads>
void launch_with(const SoftmaxStatisticsTask& task, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(task.rows.num_rows);
  const SoftmaxStatistics& out = task.out;
  if (out.best != nullptr) {
    statistics_kernel<T, kThreads, true, true, true><<<blocks, kThreads, 0, stream>>>(task);
  } else if (out.weighted != nullptr) {
    statistics_kernel<T, kThreads, true, true, false><<<blocks, kThreads, 0, stream>>>(task);
  } else if (out.total != nullptr) {
    statistics_kernel<T, kThreads, true, false, false><<<blocks, kThreads, 0, stream>>>(task);
  } else {
    statistics_kernel<T, kThreads, false, false, false><<<blocks, kThreads, 0, stream>>>(task);
  }
}

template <typename T>
void launch(const SoftmaxStatisticsTask& task, cudaStream_t stream) {
  if (task.rows.num_columns / Form<T>::kCount > kLongRow) {
    launch_with<T, 256>(task, stream);
  } else {
    launch_with<T, 128>(task, stream);
  }
}

}  // namespace

int softmax_statistics(const SoftmaxStatisticsTask& task, void* stream) {
  if (task.rows.num_rows == 0) return 0;
  const auto on = static_cast<cudaStream_t>(stream);
  with_type_of(task.rows.element, [&]<typename T>() { launch<T>(task, on); });
  return static_cast<int>(cudaGetLastError());
}

}  // namespace tessera::kernels::cuda
