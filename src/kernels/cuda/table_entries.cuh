// src/kernels/cuda/table_entries.cuh — finds and adds the gradients of a row's entries.

#pragma once

#include "kernels/cuda/table_pack.cuh"

namespace tessera::kernels::cuda {

constexpr int kStepThreads = 256;
constexpr int kSharedTables = 1024;  // first keys that fit in shared memory

/// The gradient of one entry: where it lies, and what it is multiplied with.
struct Source {
  const float* data;
  float factor;
};

__device__ __forceinline__ Source source_at(const TableCall& call, const SortedRows& sorted,
                                            const float* gradient, std::uint32_t value) {
  float factor = 1.0F;
  std::int64_t bag = value;
  if (call.ids.weights != nullptr) factor = call.ids.weights[value];
  if (sorted.bag_of != nullptr) bag = sorted.bag_of[value];
  const int f =
      call.num_features == 1
          ? 0
          : (call.is_sequence ? (call.features[0].output < 0 ? 0 : feature_of_position(call, value))
                              : feature_of_bag(call, bag));
  const TableFeature& feature = call.features[f];
  if (feature.is_mean && !call.is_sequence) {
    factor /= static_cast<float>(call.ids.offset(bag + 1) - call.ids.offset(bag));
  }
  return {gradient + place_of(call, feature, bag, value), factor};
}

__device__ __forceinline__ float within(float x, float limit) {
  x = x > limit ? limit : x;
  return x < -limit ? -limit : x;
}

__device__ __forceinline__ float sum_lanes(float x, int lanes, unsigned mask) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(mask, x, offset);
  return x;
}

/// Adds the gradients of entries begin .. end - 1 at the lane's columns.
template <int kCount, int kFlight = 4>
__device__ __forceinline__ void add_entries(const TableCall& call, const SortedRows& sorted,
                                            const float* gradient, float limit, std::uint32_t begin,
                                            std::uint32_t end, std::int64_t column, float* sums) {
  for (std::uint32_t i = begin; i < end; i += kFlight) {
    float parts[kFlight][kCount];
    float factors[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (i + u >= end) break;
      const Source source = source_at(call, sorted, gradient, sorted.values[i + u]);
      const float* from = source.data + column;
      factors[u] = source.factor;
      load_floats<kCount>(from, reinterpret_cast<std::uintptr_t>(from) % 16 == 0, parts[u]);
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (i + u >= end) break;
#pragma unroll
      for (int c = 0; c < kCount; ++c) sums[c] += factors[u] * within(parts[u][c], limit);
    }
  }
}

/// The same by all lanes of a group: each finds the gradients of some entries, which all then read.
/// `column` may be past the row's end.
template <int kCount, int kFlight = 2>
__device__ __forceinline__ void add_together(const TableCall& call, const SortedRows& sorted,
                                             const float* gradient, float limit,
                                             std::uint32_t begin, std::uint32_t end, int lanes,
                                             unsigned mask, bool has_part, std::int64_t column,
                                             float* sums) {
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  for (std::uint32_t base = begin; base < end; base += lanes) {
    Source own{gradient, 0.0F};
    if (base + lane < end) own = source_at(call, sorted, gradient, sorted.values[base + lane]);
    const int count = static_cast<int>(end - base < lanes ? end - base : lanes);
    for (int k = 0; k < count; k += kFlight) {
      float parts[kFlight][kCount];
      float factors[kFlight];
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        const int i = k + u < count ? k + u : count - 1;
        const auto from = __shfl_sync(
            mask, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(own.data)), i,
            lanes);
        factors[u] = __shfl_sync(mask, own.factor, i, lanes);
        const float* at = reinterpret_cast<const float*>(from) + column;
        if (has_part) {
          load_floats<kCount>(at, reinterpret_cast<std::uintptr_t>(at) % 16 == 0, parts[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (k + u >= count || !has_part) continue;
#pragma unroll
        for (int c = 0; c < kCount; ++c) sums[c] += factors[u] * within(parts[u][c], limit);
      }
    }
  }
}

__device__ __forceinline__ int table_of_key(const std::uint32_t* first_keys, int num_tables,
                                            std::uint32_t key) {
  int low = 0;
  int high = num_tables - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_keys[middle] <= key) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ __forceinline__ int table_of_steps(const TableSteps* tables, int num_tables,
                                              std::uint32_t key) {
  int low = 0;
  for (int high = num_tables - 1; low < high;) {
    const int middle = (low + high + 1) / 2;
    if (tables[middle].first_key <= key) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Writes a lane's columns of a row, rounded as the table says.
template <Element kElement, int kCount>
__device__ __forceinline__ void store_row(const TableSteps& table, std::int64_t row,
                                          std::int64_t column, const float* w) {
  using Form = Stored<kElement>;
  Pack<typename Form::Type, kCount> pack;
  if (kElement != Element::kFloat32 && table.step.is_stochastic) {
    const std::uint32_t seed = row_seed(table.step.key, table.state.named_row(row));
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      pack.values[c] =
          Form::narrow_at_random(w[c], column_bits(seed, static_cast<std::uint32_t>(column + c)));
    }
  } else {
#pragma unroll
    for (int c = 0; c < kCount; ++c) pack.values[c] = Form::narrow(w[c]);
  }
  store_pack<kCount>(
      static_cast<typename Form::Type*>(table.rows.data) + row * table.rows.num_columns + column,
      pack);
}

/// Whether a lane can read several of the table's numbers at once.
__host__ __device__ inline bool has_packs(const TableRows& rows) {
  const int wide = rows.element == Element::kFloat32 ? 4 : 8;
  return rows.num_columns % wide == 0 && reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0;
}

/// Widest row that the light kernels take, with packs or without.
constexpr int kLightColumns = 256;
constexpr int kLightSingles = 32;

/// Whether the light kernels step the table: rules without state per element, for rows that a warp
/// holds. The others are stepped by the kernels that know every rule.
__host__ __device__ inline bool is_light(const TableSteps& table) {
  return table.target == RowTarget::kStep && !has_full_momentum1(table.step.rule) &&
         table.rows.num_rows > 0 &&
         table.rows.num_columns <= (has_packs(table.rows) ? kLightColumns : kLightSingles);
}

/// Which light kernels take a table: by element, numbers per lane and packs per lane.
template <Element kElement, int kCount, int kPacks>
__host__ __device__ bool is_light_kind(const TableSteps& table) {
  return is_light(table) && table.rows.element == kElement &&
         has_packs(table.rows) == (kCount > 1) &&
         (kCount == 1 || (table.rows.num_columns > 32 * kCount) == (kPacks > 1));
}

/// Entries of a run that a light kernel steps among others; one with more gets a warp.
constexpr std::uint32_t kShortRun = 8;
/// Entries that a warp adds; a run with more of them is cut.
constexpr std::uint32_t kSegment = 128;
/// Entries of a run of another table that get a block.
constexpr std::uint32_t kLongRun = 64;

/// Runs that are not stepped where they are found, on the device. Their order is that of arrival,
/// and nothing depends on it.
struct RunLists {
  std::uint32_t* counts;    // heavy, medium, segments, cut
  std::uint32_t* heavy;     // more than kLongRun entries, not light: run
  std::uint32_t* medium;    // more than kShortRun entries: run
  std::uint32_t* segments;  // of runs with more than kSegment: run, number of the segment
  std::uint32_t* cut;       // those runs: run, first segment, number of segments
  float* sums;              // of each segment, `width` numbers
  std::int64_t width;
};
enum RunCount : std::uint8_t { kHeavy, kMedium, kSegments, kCut, kRunCounts };

/// Steps the short runs of light tables and lists the others.
int step_light_rows(const TableCall& call, const SortedRows& sorted, const TableSteps* tables,
                    const TableSteps* host_tables, int num_tables, const float* gradient,
                    float limit, const RunLists& lists, cudaStream_t stream);
/// Steps the listed ones.
int step_hot_rows(const TableCall& call, const SortedRows& sorted, const TableSteps* tables,
                  const TableSteps* host_tables, int num_tables, const float* gradient, float limit,
                  const RunLists& lists, cudaStream_t stream);

inline int num_multiprocessors() {
  int device = 0;
  int count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

/// Whether all gradients of the call can be read sixteen bytes at a time.
inline bool has_packed_gradients(const TableCall& call, const float* gradient) {
  return call.has_packs && reinterpret_cast<std::uintptr_t>(gradient) % 16 == 0;
}

}  // namespace tessera::kernels::cuda
