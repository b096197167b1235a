// Reads rows of tables on CUDA. Lanes that share a row share a bag too: they read its ids together,
// pass them around, and keep several rows on their way.

#include <algorithm>

#include "kernels/cuda/table_pack.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// Rows on their way per lane, and blocks that fit a multiprocessor: more warps beat more rows.
template <int kCount>
constexpr int kFlight = kCount == 8 ? 3 : 4;
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

template <Element kElement, int kCount>
__device__ __forceinline__ bool takes(const TableCall& call, const TableRows& rows, bool splits) {
  if (rows.element != kElement) return false;
  const bool is_wide = rows.num_columns % (kElement == Element::kFloat32 ? 4 : 8) == 0 &&
                       reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0;
  return is_wide == (kCount > 1) && (!is_wide || is_split(call, rows) == splits);
}

/// Bags of the features that have this element type and width; gridDim.y counts all features.
template <Element kElement, int kCount>
__global__ void __launch_bounds__(kThreads, kBlocks<kCount>)
    pooled_kernel(TableCall call, float* output) {
  using Form = Stored<kElement>;
  constexpr int kRows = kFlight<kCount>;
  const TableFeature& feature = call.features[blockIdx.y];
  if (!takes<kElement, kCount>(call, feature.rows, false)) return;
  const std::int64_t columns = feature.rows.num_columns;
  const int lanes = lanes_for(columns, kCount);
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const std::int64_t bag =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  const unsigned mask =
      lanes == 32 ? ~0U : ((1U << lanes) - 1U) << (threadIdx.x % 32 / lanes * lanes);
  if (bag >= feature.num_bags) return;
  const std::int64_t first = call.ids.offset(feature.first_bag + bag);
  const std::int64_t last = call.ids.offset(feature.first_bag + bag + 1);
  const auto* data = static_cast<const typename Form::Type*>(feature.rows.data);
  const auto num_rows = static_cast<std::uint64_t>(feature.rows.num_rows);
  float* to = output + feature.output + bag * feature.output_stride;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
  const float factor =
      feature.is_mean && last > first ? 1.0F / static_cast<float>(last - first) : 1.0F;
  for (std::int64_t column = static_cast<std::int64_t>(lane) * kCount;
       column - lane * kCount < columns; column += static_cast<std::int64_t>(lanes) * kCount) {
    float sums[kCount] = {};
    for (std::int64_t base = first; base < last; base += lanes) {
      // Lanes beyond the end read the last id again.
      const std::int64_t own = base + lane < last ? base + lane : last - 1;
      auto id = static_cast<std::uint64_t>(call.ids.id(own));
      if (id >= num_rows) id = 0;
      const float weight = call.ids.weights == nullptr ? 1.0F : call.ids.weights[own];
      const int count = static_cast<int>(last - base < lanes ? last - base : lanes);
      for (int k = 0; k < count; k += kRows) {
        Pack<typename Form::Type, kCount> rows[kRows];
        float weights[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          const int source = k + u < count ? k + u : count - 1;
          const auto row = __shfl_sync(mask, static_cast<unsigned long long>(id), source, lanes);
          weights[u] = __shfl_sync(mask, weight, source, lanes);
          if (column < columns && num_rows > 0 && k + u < count) {
            rows[u] = load_pack<kCount>(data + static_cast<std::int64_t>(row) * columns + column);
          } else {
            rows[u] = {};
          }
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (k + u >= count) continue;
#pragma unroll
          for (int i = 0; i < kCount; ++i) sums[i] += weights[u] * Form::widen(rows[u].values[i]);
        }
      }
    }
    if (column < columns) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] *= factor;
      store_floats<kCount>(to + column, is_aligned, sums);
    }
  }
}

/// Where a bag's ids lie, and the one of them that the lane holds.
struct BagIds {
  std::int64_t first = 0;
  int count = 0;

  BagIds() = default;
  __device__ BagIds(const TableCall& call, const TableFeature& feature, std::int64_t bag) {
    if (bag >= feature.num_bags) return;
    first = call.ids.offset(feature.first_bag + bag);
    count = static_cast<int>(call.ids.offset(feature.first_bag + bag + 1) - first);
  }
  /// Lanes beyond the end hold the last id.
  __device__ __forceinline__ std::int64_t position(int i) const {
    return first + (i < count ? i : count - 1);
  }
};

/// The same for rows of 16-bit numbers that half a warp holds, in long bags: two groups of lanes
/// share a bag, and take bag after bag. The ids of the next bag, and where those of the one after
/// it lie, are read while rows are on their way.
template <Element kElement, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 3) split_kernel(TableCall call, float* output) {
  using Form = Stored<kElement>;
  constexpr int kRows = kWeighted ? 4 : 5;
  const TableFeature& feature = call.features[blockIdx.y];
  if (!takes<kElement, 8>(call, feature.rows, true)) return;
  const auto columns = static_cast<std::uint32_t>(feature.rows.num_columns);
  const int lanes = lanes_for(columns, 8);
  const int all = 2 * lanes;
  const int lane = static_cast<int>(threadIdx.x) % all;  // among those of the bag
  const int part = lane / lanes;
  const unsigned mask = all == 32 ? ~0U : ((1U << all) - 1U) << (threadIdx.x % 32 / all * all);
  const std::uint32_t column = static_cast<std::uint32_t>(lane % lanes) * 8;
  const auto num_rows = static_cast<std::uint64_t>(feature.rows.num_rows);
  const bool has_part = column < columns && num_rows > 0;
  const auto* data =
      static_cast<const typename Form::Type*>(feature.rows.data) + (has_part ? column : 0);
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * (kThreads / all);
  const auto id_at = [&](std::int64_t position) {
    const auto id = static_cast<std::uint64_t>(call.ids.id(position));
    return id >= num_rows ? 0U : static_cast<std::uint32_t>(id);
  };
  std::int64_t bag = static_cast<std::int64_t>(blockIdx.x) * (kThreads / all) + threadIdx.x / all;
  BagIds own(call, feature, bag);
  BagIds next(call, feature, bag + stride);
  std::uint32_t id = own.count > 0 ? id_at(own.position(lane)) : 0;
  [[maybe_unused]] float weight = 0;
  if (kWeighted && own.count > 0) weight = call.ids.weights[own.position(lane)];
  for (; bag < feature.num_bags; bag += stride) {
    const std::uint32_t next_id = next.count > 0 ? id_at(next.position(lane)) : 0;
    [[maybe_unused]] float next_weight = 0;
    if (kWeighted && next.count > 0) next_weight = call.ids.weights[next.position(lane)];
    const BagIds later(call, feature, bag + 2 * stride);
    float sums[8] = {};
    for (int base = 0; base < own.count; base += all) {
      if (base > 0) {
        id = id_at(own.position(base + lane));
        if constexpr (kWeighted) weight = call.ids.weights[own.position(base + lane)];
      }
      const int count = min(own.count - base, all);
      for (int k = 0; k < count; k += 2 * kRows) {
        Pack<typename Form::Type, 8> rows[kRows];
        [[maybe_unused]] float weights[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          const int i = k + 2 * u + part;
          const std::uint32_t row = __shfl_sync(mask, id, min(i, count - 1), all);
          if constexpr (kWeighted) {
            weights[u] = __shfl_sync(mask, weight, min(i, count - 1), all);
            if (i >= count) weights[u] = 0;
          }
          if (has_part && i < count) {
            rows[u] = load_pack<8>(data + static_cast<std::uint64_t>(row) * columns);
          } else {
            rows[u] = {};
          }
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          // What is not there was set to zero.
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            const float x = Form::widen(rows[u].values[c]);
            sums[c] += kWeighted ? weights[u] * x : x;
          }
        }
      }
    }
    // Both groups have the sum then, and each writes half of it.
    const float factor =
        feature.is_mean && own.count > 0 ? 1.0F / static_cast<float>(own.count) : 1.0F;
    float half[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float give = part == 0 ? sums[4 + c] : sums[c];
      const float keep = part == 0 ? sums[c] : sums[4 + c];
      half[c] = factor * (keep + __shfl_xor_sync(mask, give, lanes, all));
    }
    float* const to = output + feature.output + bag * feature.output_stride + column + part * 4;
    if (column < columns) {
      store_floats<4>(to, reinterpret_cast<std::uintptr_t>(to) % 16 == 0, half);
    }
    own = next;
    next = later;
    id = next_id;
    weight = next_weight;
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

template <Element kElement, int kCount>
void start_pooled(const TableCall& call, const TableFeature* features, float* output,
                  cudaStream_t stream) {
  std::int64_t blocks = 0;
  for (int f = 0; f < call.num_features; ++f) {
    const TableFeature& feature = features[f];
    if (feature.rows.element != kElement || per_lane_of(feature.rows) != kCount) continue;
    if (kCount > 1 && is_split(call, feature.rows)) continue;
    const std::int64_t bags = kThreads / lanes_for(feature.rows.num_columns, kCount);
    blocks = std::max(blocks, (feature.num_bags + bags - 1) / bags);
  }
  if (blocks == 0) return;
  pooled_kernel<kElement, kCount>
      <<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(call.num_features)), kThreads, 0,
         stream>>>(call, output);
}

template <Element kElement>
void start_split(const TableCall& call, const TableFeature* features, float* output,
                 cudaStream_t stream) {
  // Bags that a group takes, if there are blocks enough for all multiprocessors then.
  constexpr std::int64_t kBagsInTurn = 8;
  constexpr std::int64_t kManyBlocks = 2048;
  std::int64_t most = 0;
  std::int64_t all = 0;
  for (int f = 0; f < call.num_features; ++f) {
    const TableFeature& feature = features[f];
    if (feature.rows.element != kElement || per_lane_of(feature.rows) != 8) continue;
    if (!is_split(call, feature.rows)) continue;
    const std::int64_t bags = kThreads / (2 * lanes_for(feature.rows.num_columns, 8));
    const std::int64_t blocks = (feature.num_bags + bags - 1) / bags;
    most = std::max(most, blocks);
    all += blocks;
  }
  if (most == 0) return;
  const std::int64_t turns = std::clamp<std::int64_t>(all / kManyBlocks, 1, kBagsInTurn);
  const dim3 grid(static_cast<unsigned>((most + turns - 1) / turns),
                  static_cast<unsigned>(call.num_features));
  if (call.ids.weights != nullptr) {
    split_kernel<kElement, true><<<grid, kThreads, 0, stream>>>(call, output);
  } else {
    split_kernel<kElement, false><<<grid, kThreads, 0, stream>>>(call, output);
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
  start_split<Element::kFloat16>(call, host_features, output, queue);
  start_pooled<Element::kFloat16, 1>(call, host_features, output, queue);
  start_pooled<Element::kBFloat16, 8>(call, host_features, output, queue);
  start_split<Element::kBFloat16>(call, host_features, output, queue);
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
