// Sums of rows along the edges of a graph. A group of lanes has a row, each lane 16 bytes of its
// columns: the edges of the row are walked in their order, so that the sum has the same bits in
// every run, and the rows of several of them are on their way at once.

#include <algorithm>

#include "kernels/cuda/neighbour_launch.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
/// Rows of other ends that are on their way at once.
constexpr int kFlight = 8;

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Part {
  T values[kCount];
};

/// Which row a group of lanes has, and which columns a lane.
struct Lanes {
  int lane;
  unsigned mask;  // of the group
  std::int64_t row;
  std::int64_t column;
  bool has_part;

  __device__ Lanes(int lanes, int per_lane, std::int64_t num_columns)
      : lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        row((static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / lanes),
        column((static_cast<std::int64_t>(blockIdx.y) * lanes + lane) * per_lane),
        has_part(column < num_columns) {
    const unsigned all = lanes == 32 ? ~0U : (1U << lanes) - 1U;
    mask = all << (threadIdx.x % 32 / lanes * lanes);
    if (!has_part) column = num_columns - per_lane;  // reads what the last lane reads
  }
};

/// What rows are multiplied with: nothing, one number per edge, or one per edge and column.
enum class Weights : std::uint8_t { kNone, kSingle, kWide };

/// Adds the part of a row that came along edge k.
template <typename T, int kCount, Weights kWeights>
__device__ __forceinline__ void add(const EdgeRows& rows, std::int64_t k, const T* weights,
                                    std::int64_t num_columns, std::int64_t column,
                                    const Part<T, kCount>& part, Part<T, kCount>& sum) {
  Part<T, kCount> factor;
  if constexpr (kWeights == Weights::kWide) {
    factor =
        *reinterpret_cast<const Part<T, kCount>*>(weights + rows.edge[k] * num_columns + column);
  } else {
    const T single = kWeights == Weights::kSingle ? weights[rows.edge[k]] : T(1);
#pragma unroll
    for (int c = 0; c < kCount; ++c) factor.values[c] = single;
  }
#pragma unroll
  for (int c = 0; c < kCount; ++c) sum.values[c] += part.values[c] * factor.values[c];
}

template <typename T, int kCount, Weights kWeights>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(EdgeRows rows, std::int64_t num_rows, const T* input, std::int64_t num_columns,
               const T* weights, T* output, int lanes) {
  using Piece = Part<T, kCount>;
  const Lanes own(lanes, kCount, num_columns);
  if (own.row >= num_rows) return;
  const std::int64_t begin = rows.first[own.row];
  const std::int64_t end = rows.first[own.row + 1];
  Piece sum{};
  std::int64_t k = begin;
  // All lanes of a group read the same numbers of the edges: one transaction, and no exchange.
  for (; k + kFlight <= end; k += kFlight) {
    Piece parts[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      parts[u] =
          *reinterpret_cast<const Piece*>(input + rows.column[k + u] * num_columns + own.column);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      add<T, kCount, kWeights>(rows, k + u, weights, num_columns, own.column, parts[u], sum);
    }
  }
#pragma unroll 1
  for (; k < end; ++k) {
    const Piece part =
        *reinterpret_cast<const Piece*>(input + rows.column[k] * num_columns + own.column);
    add<T, kCount, kWeights>(rows, k, weights, num_columns, own.column, part, sum);
  }
  if (own.has_part) {
    *reinterpret_cast<Piece*>(output + own.row * num_columns + own.column) = sum;
  }
}

/// Of one number per edge and column.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    product_kernel(EdgeRows rows, std::int64_t num_rows, const T* a, const T* b,
                   std::int64_t num_columns, T* output, int lanes) {
  using Piece = Part<T, kCount>;
  const Lanes own(lanes, kCount, num_columns);
  if (own.row >= num_rows || !own.has_part) return;
  const Piece right = *reinterpret_cast<const Piece*>(b + own.row * num_columns + own.column);
  const std::int64_t end = rows.first[own.row + 1];
  for (std::int64_t k = rows.first[own.row]; k < end; ++k) {
    Piece part = *reinterpret_cast<const Piece*>(a + rows.column[k] * num_columns + own.column);
#pragma unroll
    for (int c = 0; c < kCount; ++c) part.values[c] *= right.values[c];
    *reinterpret_cast<Piece*>(output + rows.edge[k] * num_columns + own.column) = part;
  }
}

/// Of one number per edge: a lane sums its columns, then the group the lanes, as a tree.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    dot_kernel(EdgeRows rows, std::int64_t num_rows, const T* a, const T* b,
               std::int64_t num_columns, T* output, int lanes) {
  using Piece = Part<T, kCount>;
  const Lanes own(lanes, kCount, num_columns);
  if (own.row >= num_rows) return;
  const std::int64_t end = rows.first[own.row + 1];
  const T* const right = b + own.row * num_columns;
  for (std::int64_t k = rows.first[own.row]; k < end; ++k) {
    const T* const left = a + rows.column[k] * num_columns;
    T sum = 0;
    for (std::int64_t at = own.lane * kCount; at < num_columns; at += lanes * kCount) {
      const Piece x = *reinterpret_cast<const Piece*>(left + at);
      const Piece y = *reinterpret_cast<const Piece*>(right + at);
#pragma unroll
      for (int c = 0; c < kCount; ++c) sum += x.values[c] * y.values[c];
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(own.mask, sum, offset);
    }
    if (own.lane == 0) output[rows.edge[k]] = sum;
  }
}

/// Calls `start` with the numbers that a lane reads at once, the lanes of a group and the grid.
template <typename T, typename Start>
int start_kernel(std::int64_t num_rows, std::int64_t num_columns, bool is_aligned, bool has_parts,
                 const Start& start) {
  if (num_rows == 0 || num_columns == 0) return 0;
  constexpr int kWide = 16 / sizeof(T);
  const bool is_wide = is_aligned && num_columns % kWide == 0;
  const std::int64_t packs = is_wide ? num_columns / kWide : num_columns;
  int lanes = 1;
  while (lanes < 32 && lanes < packs) lanes *= 2;
  const std::int64_t per_block = kThreads / lanes;
  const dim3 grid(static_cast<unsigned>((num_rows + per_block - 1) / per_block),
                  has_parts ? static_cast<unsigned>((packs + lanes - 1) / lanes) : 1U);
  if (is_wide) {
    start.template operator()<kWide>(grid, lanes);
  } else {
    start.template operator()<1>(grid, lanes);
  }
  return cudaGetLastError();
}

template <typename... Pointers>
bool is_aligned(Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace

template <typename T>
int neighbour_sum(const EdgeRows& rows, std::int64_t num_rows, const T* input,
                  std::int64_t num_columns, const T* weights, std::int64_t width, T* output,
                  void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  const auto start = [&]<Weights kWeights>() {
    return start_kernel<T>(num_rows, num_columns, is_aligned(input, output, weights), true,
                           [&]<int kCount>(dim3 grid, int lanes) {
                             sum_kernel<T, kCount, kWeights><<<grid, kThreads, 0, queue>>>(
                                 rows, num_rows, input, num_columns, weights, output, lanes);
                           });
  };
  if (weights == nullptr) return start.template operator()<Weights::kNone>();
  return width == 1 ? start.template operator()<Weights::kSingle>()
                    : start.template operator()<Weights::kWide>();
}

template <typename T>
int edge_product(const EdgeRows& rows, std::int64_t num_rows, const T* a, const T* b,
                 std::int64_t num_columns, std::int64_t width, T* output, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  const bool is_dot = width == 1;
  return start_kernel<T>(num_rows, num_columns, is_aligned(a, b, output), !is_dot,
                         [&]<int kCount>(dim3 grid, int lanes) {
                           if (is_dot) {
                             dot_kernel<T, kCount><<<grid, kThreads, 0, queue>>>(
                                 rows, num_rows, a, b, num_columns, output, lanes);
                           } else {
                             product_kernel<T, kCount><<<grid, kThreads, 0, queue>>>(
                                 rows, num_rows, a, b, num_columns, output, lanes);
                           }
                         });
}

template int neighbour_sum(const EdgeRows&, std::int64_t, const float*, std::int64_t, const float*,
                           std::int64_t, float*, void*);
template int neighbour_sum(const EdgeRows&, std::int64_t, const double*, std::int64_t,
                           const double*, std::int64_t, double*, void*);
template int edge_product(const EdgeRows&, std::int64_t, const float*, const float*, std::int64_t,
                          std::int64_t, float*, void*);
template int edge_product(const EdgeRows&, std::int64_t, const double*, const double*, std::int64_t,
                          std::int64_t, double*, void*);

}  // namespace tessera::kernels::cuda
