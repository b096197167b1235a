// Statistics and gradient of the summed loss in one read and one write of the logits, for rows that
// fit the registers of one block.
//
// A block takes one row: every thread holds up to kPacks packs of 16 bytes as they were read, the
// block joins maxima and sums once, and the exponentials are made a second time from the packs. At
// most 64 registers per thread, so that 1024 threads share a multiprocessor: while one block joins
// its sums, others read and write. The exponentials themselves would not fit.

#include <type_traits>

#include "kernels/cuda/fused_task.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/logit_pack.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kPacks = 8;
constexpr int kMostThreads = 512;

/// Element i of a pack, by other instructions than Form::get: the compiler would else keep what it
/// has widened once, and there are no registers for that.
template <typename T>
__device__ __forceinline__ float get_again(const uint4& pack, int i) {
  const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
  uint32_t r;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (i % 2 == 0) {
      asm volatile("prmt.b32 %0, %1, 0, 0x1044;" : "=r"(r) : "r"(words[i / 2]));
    } else {
      asm volatile("prmt.b32 %0, %1, 0, 0x3244;" : "=r"(r) : "r"(words[i / 2]));
    }
    return __uint_as_float(r);
  } else {
    if (i % 2 == 0) {
      asm volatile("prmt.b32 %0, %1, 0, 0x4410;" : "=r"(r) : "r"(words[i / 2]));
    } else {
      asm volatile("prmt.b32 %0, %1, 0, 0x4432;" : "=r"(r) : "r"(words[i / 2]));
    }
    return __half2float(__ushort_as_half(static_cast<unsigned short>(r)));
  }
}

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) rows_kernel(FusedTask task) {
  using F = Form<T>;
  constexpr int kCount = F::kCount;
  constexpr int kWarps = kThreads / 32;
  __shared__ Part of_warp[kWarps];
  let_next_start();
  const int64_t row = blockIdx.x;
  const int thread = threadIdx.x;
  const int num_columns = static_cast<int>(task.statistics.rows.num_columns);
  T* x = static_cast<T*>(const_cast<void*>(task.statistics.rows.data)) +
         task.statistics.rows.offset(row);
  const Cut cut = cut_row(x, num_columns);
  uint4* places = reinterpret_cast<uint4*>(x + cut.head) + thread;
  const int num_here = cut.num_packs - thread;  // places 0, kThreads, ... below it are ours

  uint4 packs[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    packs[u] = padding_pack<T>();
    if (u * kThreads < num_here) packs[u] = places[u * kThreads];
  }
  const bool has_edge = thread < cut.head + cut.tail;
  const int edge_column = has_edge ? column_of_edge(cut, num_columns, thread) : -1;
  const float edge = has_edge ? F::widen(x[edge_column]) : minus_infinity();
  const RowPlan plan = plan_of(task.statistics, row);
  const float label_logit = plan.label_column >= 0 ? F::widen(x[plan.label_column]) : 0.F;

  const float factor = task.statistics.scale * kLog2E;
  float top = edge == edge ? edge : minus_infinity();
#pragma unroll
  for (int u = 0; u < kPacks; ++u) top = fmaxf(top, F::largest(packs[u]));
  const float center = center_of(top);
  float s0 = has_edge ? exp2_fast(exponent_of(edge, center, factor)) : 0.F, s1 = 0.F;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      s0 += exp2_fast(exponent_of(F::get(packs[u], i), center, factor));
      s1 += exp2_fast(exponent_of(F::get(packs[u], i + 1), center, factor));
    }
  }
  const Part own = join_warp({top, s0 + s1}, factor);
  if (thread % 32 == 0) of_warp[thread / 32] = own;
  __syncthreads();
  const int lane = thread % 32;
  const Part all = join_warp(lane < kWarps ? of_warp[lane] : Part{minus_infinity(), 0.F}, factor);

  const float inverse = task.inverse != nullptr ? *task.inverse : 1.F;
  const auto [weight, by_sum] = slope_of(task, all, plan.ignored, inverse);
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    float values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float e = exp2_fast(exponent_of(get_again<T>(packs[u], i), all.maximum, factor));
      values[i] = plan.ignored ? 0.F : e * by_sum;
    }
    if (u * kThreads < num_here) places[u * kThreads] = F::pack(values);
  }
  const auto write = [&](int column, float logit) {
    const float p = exp2_fast(exponent_of(logit, all.maximum, factor));
    const bool is_label = column == plan.label_column;
    x[column] = F::narrow(plan.ignored ? 0.F : fmaf(p, by_sum, is_label ? -weight : 0.F));
  };
  if (has_edge) write(edge_column, edge);
  // The label's element again, by the thread that wrote its pack: rounded once.
  const int label_place = plan.label_column - cut.head;
  const bool label_in_pack = label_place >= 0 && label_place < cut.num_packs * kCount;
  if (label_in_pack && label_place / kCount % kThreads == thread) {
    write(plan.label_column, label_logit);
  }
  if (thread == 0) {
    task.statistics.out.maximum[row] = all.maximum;
    task.statistics.out.sum[row] = all.sum;
    task.statistics.out.target[row] = plan.label_column < 0 ? minus_infinity() : label_logit;
  }
}

template <typename T>
void launch(const FusedTask& task, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(task.statistics.rows.num_rows);
  const int threads = (task.num_packs + kPacks - 1) / kPacks;
  if (threads <= 128) {
    rows_kernel<T, 128><<<blocks, 128, 0, stream>>>(task);
  } else if (threads <= 256) {
    rows_kernel<T, 256><<<blocks, 256, 0, stream>>>(task);
  } else {
    rows_kernel<T, 512><<<blocks, 512, 0, stream>>>(task);
  }
}

}  // namespace

bool fits_block(const LogitRows& rows) {
  return rows.num_columns / 8 <= std::int64_t{kMostThreads} * kPacks;
}

cudaError_t softmax_fused_rows(const FusedTask& task, cudaStream_t stream) {
  if (task.statistics.rows.element == Element::kBFloat16) {
    launch<__nv_bfloat16>(task, stream);
  } else {
    launch<__half>(task, stream);
  }
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
