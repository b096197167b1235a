// Reads rows of tables on CUDA. Lanes that share a row share a bag too: they read its ids together,
// pass them around, and keep several rows on their way.

#include <algorithm>

#include "kernels/cuda/table_pack.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// Rows on their way per lane, and blocks that fit a multiprocessor: more warps beat more rows.
template <int kCount, int kSplit, bool kWeighted>
constexpr int kFlight = kSplit == 2 ? (kWeighted ? 4 : 5) : (kCount == 8 ? 3 : 4);
template <int kCount>
constexpr int kBlocks = kCount == 8 ? 3 : 4;

/// Whether two groups of lanes share a bag, each reading every other row: of narrow rows more are
/// then on their way at once, if bags are long enough for both.
__host__ __device__ inline bool is_split(const TableCall& call, const TableRows& rows) {
  return rows.element != Element::kFloat32 && lanes_for(rows.num_columns, 8) <= 16 &&
         call.num_positions >= 8 * call.num_bags;
}

__global__ void __launch_bounds__(kThreads) set_kernel(std::int64_t* result, std::int64_t value) {
  *result = value;
}

/// One thread per bag.
__global__ void __launch_bounds__(kThreads) check_kernel(TableCall call, std::int64_t* result) {
  const std::int64_t bag = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  auto* smallest = reinterpret_cast<long long*>(result);
  if (bag == 0 &&
      (call.ids.offset(0) != 0 || call.ids.offset(call.num_bags) != call.num_positions)) {
    atomicMin(smallest, -2LL);
    return;
  }
  if (bag >= call.num_bags) return;
  const std::int64_t first = call.ids.offset(bag);
  const std::int64_t last = call.ids.offset(bag + 1);
  if (first > last || first < 0 || last > call.num_positions) {
    atomicMin(smallest, -2LL);
    return;
  }
  const auto num_rows =
      static_cast<std::uint64_t>(call.features[feature_of_bag(call, bag)].rows.num_rows);
  for (std::int64_t k = first; k < last; ++k) {
    if (static_cast<std::uint64_t>(call.ids.id(k)) >= num_rows) {
      atomicMin(smallest, static_cast<long long>(k));
      return;
    }
  }
}

/// Bags of the features that have this element type and width; gridDim.y counts all features.
/// kSplit groups of lanes share a bag.
template <Element kElement, int kCount, int kSplit, bool kWeighted>
__global__ void __launch_bounds__(kThreads, kBlocks<kCount>)
    pooled_kernel(TableCall call, float* output) {
  using Form = Stored<kElement>;
  constexpr int kRows = kFlight<kCount, kSplit, kWeighted>;
  const TableFeature& feature = call.features[blockIdx.y];
  if (feature.rows.element != kElement) return;
  const auto columns = static_cast<std::uint32_t>(feature.rows.num_columns);
  const bool is_wide = columns % (kElement == Element::kFloat32 ? 4 : 8) == 0 &&
                       reinterpret_cast<std::uintptr_t>(feature.rows.data) % 16 == 0;
  if (is_wide != (kCount > 1)) return;
  if (is_wide && is_split(call, feature.rows) != (kSplit > 1)) return;
  const int lanes = lanes_for(columns, kCount);
  const int all = lanes * kSplit;
  const int lane = static_cast<int>(threadIdx.x) % all;  // among those of the bag
  const int part = kSplit > 1 ? lane / lanes : 0;
  const std::int64_t bag =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / all) + threadIdx.x / all;
  const unsigned mask = all == 32 ? ~0U : ((1U << all) - 1U) << (threadIdx.x % 32 / all * all);
  if (bag >= feature.num_bags) return;
  const std::int64_t first = call.ids.offset(feature.first_bag + bag);
  const std::int64_t last = call.ids.offset(feature.first_bag + bag + 1);
  const auto* data = static_cast<const typename Form::Type*>(feature.rows.data);
  const auto num_rows = static_cast<std::uint64_t>(feature.rows.num_rows);
  float* to = output + feature.output + bag * feature.output_stride;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
  const float factor =
      feature.is_mean && last > first ? 1.0F / static_cast<float>(last - first) : 1.0F;
  const auto own_first = static_cast<std::uint32_t>(lane % lanes) * kCount;
  for (std::uint32_t column = own_first; column - own_first < columns; column += lanes * kCount) {
    float sums[kCount] = {};
    for (std::int64_t base = first; base < last; base += all) {
      // Lanes beyond the end read the last id again.
      const std::int64_t own = base + lane < last ? base + lane : last - 1;
      const auto wide_id = static_cast<std::uint64_t>(call.ids.id(own));
      const auto id = wide_id >= num_rows ? 0U : static_cast<std::uint32_t>(wide_id);
      const float weight = kWeighted ? call.ids.weights[own] : 1.0F;
      const int count = static_cast<int>(last - base < all ? last - base : all);
      for (int k = 0; k < count; k += kRows * kSplit) {
        Pack<typename Form::Type, kCount> rows[kRows];
        [[maybe_unused]] float weights[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          const int i = k + u * kSplit + part;
          const int source = i < count ? i : count - 1;
          const std::uint32_t row = __shfl_sync(mask, id, source, all);
          if constexpr (kWeighted) weights[u] = __shfl_sync(mask, weight, source, all);
          if (column < columns && num_rows > 0 && i < count) {
            rows[u] = load_pack<kCount>(data + static_cast<std::uint64_t>(row) * columns + column);
          } else {
            rows[u] = {};
          }
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (k + u * kSplit + part >= count) continue;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const float x = Form::widen(rows[u].values[i]);
            sums[i] += kWeighted ? weights[u] * x : x;
          }
        }
      }
    }
    if constexpr (kSplit > 1) {
      // Both groups have the sum then, and each writes half of it.
      constexpr int kHalf = kCount / kSplit;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sums[i] = factor * (sums[i] + __shfl_xor_sync(mask, sums[i], lanes, all));
      }
      float half[kHalf];
#pragma unroll
      for (int i = 0; i < kHalf; ++i) half[i] = part == 0 ? sums[i] : sums[kHalf + i];
      if (column < columns) store_floats<kHalf>(to + column + part * kHalf, is_aligned, half);
    } else if (column < columns) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] *= factor;
      store_floats<kCount>(to + column, is_aligned, sums);
    }
  }
}

__device__ float number_at(const TableRows& rows, std::int64_t i) {
  if (rows.element == Element::kFloat32) return static_cast<const float*>(rows.data)[i];
  const auto bits = static_cast<const std::uint16_t*>(rows.data)[i];
  return rows.element == Element::kFloat16 ? Stored<Element::kFloat16>::widen(bits)
                                           : Stored<Element::kBFloat16>::widen(bits);
}

/// One warp per bag; its lanes share the columns of one position after another.
__global__ void __launch_bounds__(kThreads) sequence_kernel(TableCall call, float* output) {
  const std::int64_t bag =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (bag >= call.num_bags) return;
  const TableFeature& feature = call.features[feature_of_bag(call, bag)];
  const std::int64_t columns = feature.rows.num_columns;
  const std::int64_t last = call.ids.offset(bag + 1);
  for (std::int64_t k = call.ids.offset(bag); k < last; ++k) {
    auto id = static_cast<std::uint64_t>(call.ids.id(k));
    if (id >= static_cast<std::uint64_t>(feature.rows.num_rows)) id = 0;
    const float weight = call.ids.weights == nullptr ? 1.0F : call.ids.weights[k];
    float* to = output + place_of(call, feature, bag, k);
    for (std::int64_t c = threadIdx.x % 32; c < columns; c += 32) {
      to[c] = feature.rows.num_rows == 0
                  ? 0.0F
                  : weight * number_at(feature.rows, static_cast<std::int64_t>(id) * columns + c);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    weight_gradient_kernel(TableCall call, const float* gradient, float* output) {
  const std::int64_t bag =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (bag >= call.num_bags) return;
  const TableFeature& feature = call.features[feature_of_bag(call, bag)];
  const std::int64_t columns = feature.rows.num_columns;
  const std::int64_t first = call.ids.offset(bag);
  const std::int64_t last = call.ids.offset(bag + 1);
  const float factor = feature.is_mean && !call.is_sequence && last > first
                           ? 1.0F / static_cast<float>(last - first)
                           : 1.0F;
  for (std::int64_t k = first; k < last; ++k) {
    auto id = static_cast<std::uint64_t>(call.ids.id(k));
    if (id >= static_cast<std::uint64_t>(feature.rows.num_rows)) id = 0;
    const float* from = gradient + place_of(call, feature, bag, k);
    float sum = 0;
    if (feature.rows.num_rows > 0) {
      for (std::int64_t c = threadIdx.x % 32; c < columns; c += 32) {
        sum += from[c] * number_at(feature.rows, static_cast<std::int64_t>(id) * columns + c);
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0U, sum, offset);
    if (threadIdx.x % 32 == 0) output[k] = sum * factor;
  }
}

template <Element kElement, int kCount, int kSplit = 1>
void start_pooled(const TableCall& call, const TableFeature* features, float* output,
                  cudaStream_t stream) {
  std::int64_t blocks = 0;
  for (int f = 0; f < call.num_features; ++f) {
    const TableFeature& feature = features[f];
    if (feature.rows.element != kElement || per_lane_of(feature.rows) != kCount) continue;
    if (kCount > 1 && is_split(call, feature.rows) != (kSplit > 1)) continue;
    const std::int64_t bags = kThreads / (lanes_for(feature.rows.num_columns, kCount) * kSplit);
    blocks = std::max(blocks, (feature.num_bags + bags - 1) / bags);
  }
  if (blocks == 0) return;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(call.num_features));
  if (call.ids.weights != nullptr) {
    pooled_kernel<kElement, kCount, kSplit, true><<<grid, kThreads, 0, stream>>>(call, output);
  } else {
    pooled_kernel<kElement, kCount, kSplit, false><<<grid, kThreads, 0, stream>>>(call, output);
  }
}

unsigned warp_blocks(std::int64_t num_warps) {
  return static_cast<unsigned>((num_warps + kThreads / 32 - 1) / (kThreads / 32));
}

}  // namespace

int table_check(const TableCall& call, std::int64_t* result, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  set_kernel<<<1, 1, 0, queue>>>(result, call.num_positions);
  check_kernel<<<static_cast<unsigned>(call.num_bags / kThreads + 1), kThreads, 0, queue>>>(call,
                                                                                            result);
  return cudaGetLastError();
}

int table_lookup(const TableCall& call, const TableFeature* host_features, float* output,
                 void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  if (call.num_bags == 0) return 0;
  if (call.is_sequence) {
    sequence_kernel<<<warp_blocks(call.num_bags), kThreads, 0, queue>>>(call, output);
    return cudaGetLastError();
  }
  start_pooled<Element::kFloat32, 4>(call, host_features, output, queue);
  start_pooled<Element::kFloat32, 1>(call, host_features, output, queue);
  start_pooled<Element::kFloat16, 8>(call, host_features, output, queue);
  start_pooled<Element::kFloat16, 8, 2>(call, host_features, output, queue);
  start_pooled<Element::kFloat16, 1>(call, host_features, output, queue);
  start_pooled<Element::kBFloat16, 8>(call, host_features, output, queue);
  start_pooled<Element::kBFloat16, 8, 2>(call, host_features, output, queue);
  start_pooled<Element::kBFloat16, 1>(call, host_features, output, queue);
  return cudaGetLastError();
}

int table_weight_gradient(const TableCall& call, const float* gradient, float* output,
                          void* stream) {
  if (call.num_bags == 0) return 0;
  weight_gradient_kernel<<<warp_blocks(call.num_bags), kThreads, 0,
                           static_cast<cudaStream_t>(stream)>>>(call, gradient, output);
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
