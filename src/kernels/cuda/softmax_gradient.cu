// Gradient of a softmax on CUDA: one small block per 4 KB of a row.
//
// Small tiles, plain loads and stores, rows from last to first (the last rows of forward are still
// in the second-level cache): larger tiles, loops and cache hints were all slower.

#include "kernels/cuda/launch.h"
#include "kernels/cuda/logit_pack.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kPacks = 2;
constexpr float kSmallest = -200.F;

struct Row {
  float maximum;
  float factor;  // scale * log2(e)
  float softmax;
  float weighted;  // in units of 1 / log2(e)
  float uniform;
};

template <bool kWeighted>
__device__ __forceinline__ float gradient_of(float x, const Row& row) {
  float d = exponent_of(x, row.maximum, row.factor);
  if constexpr (kWeighted) {
    d = d < kSmallest ? kSmallest : d;
    return fmaf(exp2_fast(d), fmaf(row.weighted, d, row.softmax), row.uniform);
  } else {
    return fmaf(exp2_fast(d), row.softmax, row.uniform);
  }
}

template <typename T, bool kWeighted>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(SoftmaxGradientTask task, int tiles, bool vectors) {
  using F = Form<T>;
  const int64_t row = task.rows.num_rows - 1 - static_cast<int64_t>(blockIdx.x) / tiles;
  const int tile = static_cast<int>(blockIdx.x % tiles);
  const int thread = threadIdx.x;
  const T* x = static_cast<const T*>(task.rows.data) + task.rows.offset(row);
  T* g = static_cast<T*>(task.gradient) + task.gradient_offset(row);
  const int num_columns = static_cast<int>(task.rows.num_columns);
  // Rows whose gradient is not aligned as they are go element by element.
  Cut cut = cut_row(x, num_columns);
  if (!vectors) cut = {0, 0, num_columns};

  const int first = tile * kThreads * kPacks + thread;
  const uint4* from = reinterpret_cast<const uint4*>(x + cut.head);
  uint4* to = reinterpret_cast<uint4*>(g + cut.head);
  uint4 packs[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    if (first + u * kThreads < cut.num_packs) packs[u] = from[first + u * kThreads];
  }
  const SoftmaxCoefficients& c = task.coefficients;
  const float target = c.target[row];
  const Row r{c.maximum[row], task.scale * kLog2E, c.softmax[row],
              kWeighted ? c.weighted[row] / kLog2E : 0.F, c.uniform[row]};
  const bool is_zero = r.softmax == 0.F && r.weighted == 0.F && r.uniform == 0.F && target == 0.F;
  const int64_t label_column =
      task.labels.ids != nullptr ? task.labels.ids[row] - task.labels.first_column : -1;
  const int column =
      label_column >= 0 && label_column < num_columns ? static_cast<int>(label_column) : -1;
  const int column_pack = column >= cut.head ? (column - cut.head) / F::kCount : -1;

#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int pack = first + u * kThreads;
    if (pack >= cut.num_packs) continue;
    float values[F::kCount];
#pragma unroll
    for (int i = 0; i < F::kCount; ++i) {
      values[i] = is_zero ? 0.F : gradient_of<kWeighted>(F::get(packs[u], i), r);
    }
    to[pack] = F::pack(values);
    if (pack == column_pack && !is_zero) {
      // The whole sum is formed before it is rounded.
      const int place = (column - cut.head) % F::kCount;
      float x_label = 0.F;
#pragma unroll
      for (int i = 0; i < F::kCount; ++i) x_label = i == place ? F::get(packs[u], i) : x_label;
      g[column] = F::narrow(gradient_of<kWeighted>(x_label, r) + target);
    }
  }
  // The elements outside whole packs, and the padding behind the row.
  const int outside = cut.head + cut.tail;
  const int total = outside + static_cast<int>(task.num_written) - num_columns;
  for (int k = tile * kThreads + thread; k < total; k += tiles * kThreads) {
    const int j = k < cut.head ? k : num_columns - cut.tail + (k - cut.head);
    float value = 0.F;
    if (j < num_columns && !is_zero) {
      value = gradient_of<kWeighted>(F::widen(x[j]), r) + (j == column ? target : 0.F);
    }
    g[j] = F::narrow(value);
  }
}

template <typename T>
void launch(const SoftmaxGradientTask& task, cudaStream_t stream) {
  constexpr int kPerTile = kThreads * kPacks * Form<T>::kCount;
  const auto tiles = static_cast<int>((task.num_written + kPerTile - 1) / kPerTile);
  const auto blocks = static_cast<unsigned>(task.rows.num_rows * tiles);
  const auto apart = static_cast<std::int64_t>(reinterpret_cast<uintptr_t>(task.gradient) -
                                               reinterpret_cast<uintptr_t>(task.rows.data));
  const auto is_aligned = [](std::int64_t bytes) { return bytes % 16 == 0; };
  const bool vectors = is_aligned(apart) &&
                       is_aligned((task.inner_stride - task.rows.inner_stride) *
                                  static_cast<std::int64_t>(sizeof(T))) &&
                       is_aligned((task.outer_stride - task.rows.outer_stride) *
                                  static_cast<std::int64_t>(sizeof(T)));
  if (task.coefficients.weighted != nullptr) {
    gradient_kernel<T, true><<<blocks, kThreads, 0, stream>>>(task, tiles, vectors);
  } else {
    gradient_kernel<T, false><<<blocks, kThreads, 0, stream>>>(task, tiles, vectors);
  }
}

}  // namespace

int softmax_gradient(const SoftmaxGradientTask& task, void* stream) {
  if (task.rows.num_rows == 0 || task.num_written == 0) return 0;
  const auto on = static_cast<cudaStream_t>(stream);
  with_type_of(task.rows.element, [&]<typename T>() { launch<T>(task, on); });
  return static_cast<int>(cudaGetLastError());
}

}  // namespace tessera::kernels::cuda
