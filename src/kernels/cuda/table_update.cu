// Steps rows of tables on CUDA: sort the looked-up rows, find where each one's entries begin, then
// sum and step. A row belongs to one group of lanes, which adds in the order of the sorted entries.
// A row with very many entries belongs to a block instead, whose groups add fixed shares of them
// that are then added in order: slower to start, but no row holds up the others.

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>

#include <algorithm>
#include <bit>

#include "kernels/cuda/table_pack.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSharedTables = 1024;  // first keys that fit in shared memory
// Of the light kernel: runs on their way per group of lanes.
template <int kCount>
constexpr int kLightRuns = kCount == 8 ? 2 : 4;

/// One warp per bag.
__global__ void __launch_bounds__(kThreads)
    fill_kernel(TableCall call, const std::int32_t* table_of, const std::uint32_t* first_keys,
                bool keep_bags, std::uint32_t* keys, std::uint32_t* values, std::uint32_t* bag_of) {
  const std::int64_t bag =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (bag >= call.num_bags) return;
  const int f = feature_of_bag(call, bag);
  const auto num_rows = static_cast<std::uint64_t>(call.features[f].rows.num_rows);
  const std::uint32_t first_key = first_keys[table_of[f]];
  const std::int64_t last = call.ids.offset(bag + 1);
  for (std::int64_t k = call.ids.offset(bag) + threadIdx.x % 32; k < last; k += 32) {
    auto id = static_cast<std::uint64_t>(call.ids.id(k));
    if (id >= num_rows) id = 0;
    // Without rows there is nothing to step: such a key is that of no table's row.
    keys[k] = num_rows == 0 ? ~0U : first_key + static_cast<std::uint32_t>(id);
    values[k] = static_cast<std::uint32_t>(keep_bags || call.is_sequence ? k : bag);
    if (keep_bags) bag_of[k] = static_cast<std::uint32_t>(bag);
  }
}

struct IsStart {
  const std::uint32_t* keys;
  __host__ __device__ bool operator()(std::uint32_t i) const {
    return i == 0 || keys[i] != keys[i - 1];
  }
};

/// How the work memory of a sort is cut.
struct SortMemory {
  std::size_t keys, values, sorted_keys, sorted_values, bag_of, starts, count, temporary, bytes;
  std::size_t sort_bytes = 0;
  std::size_t select_bytes = 0;

  explicit SortMemory(std::int64_t count_of_positions) {
    const auto n = static_cast<int>(count_of_positions);
    cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, static_cast<std::uint32_t*>(nullptr),
                                    static_cast<std::uint32_t*>(nullptr),
                                    static_cast<std::uint32_t*>(nullptr),
                                    static_cast<std::uint32_t*>(nullptr), n);
    cub::DeviceSelect::Flagged(nullptr, select_bytes, thrust::counting_iterator<std::uint32_t>(0),
                               thrust::make_transform_iterator(
                                   thrust::counting_iterator<std::uint32_t>(0), IsStart{nullptr}),
                               static_cast<std::uint32_t*>(nullptr),
                               static_cast<std::uint32_t*>(nullptr), n);
    std::size_t next = 0;
    const auto take = [&](std::size_t size) {
      const std::size_t here = next;
      next += (size + 255) / 256 * 256;
      return here;
    };
    const std::size_t array = static_cast<std::size_t>(count_of_positions) * 4;
    keys = take(array);
    values = take(array);
    sorted_keys = take(array);
    sorted_values = take(array);
    bag_of = take(array);
    starts = take(array);
    count = take(4);
    temporary = take(std::max(sort_bytes, select_bytes));
    bytes = next;
  }
};

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
template <int kCount>
__device__ __forceinline__ void add_together(const TableCall& call, const SortedRows& sorted,
                                             const float* gradient, float limit,
                                             std::uint32_t begin, std::uint32_t end, int lanes,
                                             unsigned mask, bool has_part, std::int64_t column,
                                             float* sums) {
  constexpr int kFlight = 2;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
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

/// What the lanes of a group know of the row they step.
struct Group {
  int lanes;
  int lane;
  unsigned mask;
};

/// Numbers of a whole row that its step depends on.
struct RowNumbers {
  float rate = 0;         // SGD and its kin, LAMB (with the ratio), LARS
  float denominator = 0;  // rules with one v per row
};

/// One lane's part of a row and its state in registers.
template <int kCount>
struct Part {
  float w[kCount];
  float g[kCount];
  float m[kCount];
  float v[kCount];
};

template <Element kElement, int kCount, bool kFull>
__device__ __forceinline__ void load_part(const TableSteps& table, std::int64_t row,
                                          std::int64_t column, Part<kCount>& part) {
  using Form = Stored<kElement>;
  const std::int64_t at = row * table.rows.num_columns + column;
  const auto pack =
      load_pack<kCount>(static_cast<const typename Form::Type*>(table.rows.data) + at);
#pragma unroll
  for (int c = 0; c < kCount; ++c) part.w[c] = Form::widen(pack.values[c]);
  if constexpr (kFull) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) part.m[c] = table.state.momentum1[at + c];
    if (has_full_momentum2(table.step.rule)) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) part.v[c] = table.state.momentum2[at + c];
    }
  }
}

/// Weight decay that is not part of the rule.
template <int kCount>
__device__ __forceinline__ void decay(const RowStep& step, Part<kCount>& part) {
  if (step.decay == 0.0F || step.rule >= RowRule::kLamb) return;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    if (step.is_decoupled) {
      part.w[c] *= 1.0F - step.rate * step.decay;
    } else {
      part.g[c] += step.decay * part.w[c];
    }
  }
}

/// LAMB's direction at one element, with m and v brought up to date.
template <int kCount>
__device__ __forceinline__ float lamb_direction(const RowStep& step, Part<kCount>& part, int c,
                                                float row_denominator) {
  part.m[c] = step.beta1 * part.m[c] + step.rest1 * part.g[c];
  float below = row_denominator;
  if (step.rule == RowRule::kLamb) {
    part.v[c] = step.beta2 * part.v[c] + step.rest2 * part.g[c] * part.g[c];
    below = sqrtf(part.v[c] * step.correction2) + step.eps;
  }
  return part.m[c] * step.correction1 / below + step.decay * part.w[c];
}

/// Applies the rule to one part. `u` is LAMB's direction, if the rule is LAMB.
template <int kCount, bool kFull>
__device__ __forceinline__ void step_part(const RowStep& step, const RowNumbers& numbers,
                                          Part<kCount>& part) {
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const float g = part.g[c];
    if constexpr (!kFull) {
      part.w[c] -= numbers.rate * g;
      continue;
    }
    switch (step.rule) {
      case RowRule::kAdagrad:
        part.m[c] += g * g;
        part.w[c] -= step.rate * g / (sqrtf(part.m[c]) + step.eps);
        break;
      case RowRule::kAdam:
        part.m[c] = step.beta1 * part.m[c] + step.rest1 * g;
        part.v[c] = step.beta2 * part.v[c] + step.rest2 * g * g;
        part.w[c] -= step.rate * (part.m[c] * step.correction1) /
                     (sqrtf(part.v[c] * step.correction2) + step.eps);
        break;
      case RowRule::kPartialRowWiseAdam:
        part.m[c] = step.beta1 * part.m[c] + step.rest1 * g;
        part.w[c] -= step.rate * step.correction1 / numbers.denominator * part.m[c];
        break;
      case RowRule::kLamb:
      case RowRule::kPartialRowWiseLamb: {
        const float u = lamb_direction(step, part, c, numbers.denominator);
        part.w[c] -= numbers.rate * u;
        break;
      }
      case RowRule::kLarsSgd:
        part.m[c] = step.momentum * part.m[c] + numbers.rate * (g + step.decay * part.w[c]);
        part.w[c] -= part.m[c];
        break;
      default:
        break;
    }
  }
}

template <Element kElement, int kCount, bool kFull>
__device__ __forceinline__ void store_part(const TableSteps& table, std::int64_t row,
                                           std::int64_t column, const Part<kCount>& part) {
  using Form = Stored<kElement>;
  const std::int64_t at = row * table.rows.num_columns + column;
  Pack<typename Form::Type, kCount> pack;
  if (kElement != Element::kFloat32 && table.step.is_stochastic) {
    const std::uint32_t seed = row_seed(table.step.key, row);
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      pack.values[c] = Form::narrow_at_random(
          part.w[c], column_bits(seed, static_cast<std::uint32_t>(column + c)));
    }
  } else {
#pragma unroll
    for (int c = 0; c < kCount; ++c) pack.values[c] = Form::narrow(part.w[c]);
  }
  *reinterpret_cast<Pack<typename Form::Type, kCount>*>(
      static_cast<typename Form::Type*>(table.rows.data) + at) = pack;
  if constexpr (kFull) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) table.state.momentum1[at + c] = part.m[c];
    if (has_full_momentum2(table.step.rule)) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) table.state.momentum2[at + c] = part.v[c];
    }
  }
}

/// The sums over the row that the rule needs, given this lane's parts; `visit(body)` calls body for
/// each of them, already decayed. Writes the state that a row has one number of.
template <int kCount, bool kFull, typename VisitParts>
__device__ __forceinline__ RowNumbers row_numbers(const TableSteps& table, std::int64_t row,
                                                  const Group& group, const VisitParts& visit) {
  const RowStep& step = table.step;
  RowNumbers numbers;
  numbers.rate = step.rate;
  const bool has_row_v =
      step.rule == RowRule::kPartialRowWiseAdam || step.rule == RowRule::kPartialRowWiseLamb;
  if (step.rule == RowRule::kRowWiseAdagrad || has_row_v) {
    float square = 0;
    visit([&](Part<kCount>& part) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) square += part.g[c] * part.g[c];
    });
    square =
        sum_lanes(square, group.lanes, group.mask) / static_cast<float>(table.rows.num_columns);
    if (!has_row_v) {
      const float h = table.state.momentum1[row] + square;
      __syncwarp(group.mask);
      if (group.lane == 0) table.state.momentum1[row] = h;
      numbers.rate = step.rate / (sqrtf(h) + step.eps);
    } else {
      const float v = step.beta2 * table.state.momentum2[row] + step.rest2 * square;
      __syncwarp(group.mask);
      if (group.lane == 0) table.state.momentum2[row] = v;
      numbers.denominator = sqrtf(v * step.correction2) + step.eps;
    }
  }
  if constexpr (kFull) {
    if (step.rule == RowRule::kLamb || step.rule == RowRule::kPartialRowWiseLamb ||
        step.rule == RowRule::kLarsSgd) {
      float weights = 0;
      float others = 0;
      visit([&](Part<kCount> part) {  // a copy: the state must not move yet
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          weights += part.w[c] * part.w[c];
          const float other = step.rule == RowRule::kLarsSgd
                                  ? part.g[c]
                                  : lamb_direction(step, part, c, numbers.denominator);
          others += other * other;
        }
      });
      const float weight_norm = sqrtf(sum_lanes(weights, group.lanes, group.mask));
      const float other_norm = sqrtf(sum_lanes(others, group.lanes, group.mask));
      if (step.rule == RowRule::kLarsSgd) {
        const float below = other_norm + step.decay * weight_norm;
        if (weight_norm > 0 && below > 0) numbers.rate = step.rate * step.eta * weight_norm / below;
      } else if (weight_norm > 0 && other_norm > 0) {
        numbers.rate = step.rate * weight_norm / other_norm;
      }
    }
  }
  return numbers;
}

/// Steps one row (or hands its sum over). `sum(column, g)` gives the summed gradient at the lane's
/// columns; a row wider than the group asks for it twice.
template <Element kElement, int kCount, bool kFull, typename Sum>
__device__ __forceinline__ void finish_row(const TableSteps& table, std::int64_t row,
                                           std::uint32_t run, const Group& group, const Sum& sum) {
  const std::int64_t columns = table.rows.num_columns;
  const std::int64_t first = static_cast<std::int64_t>(group.lane) * kCount;
  const std::int64_t width = static_cast<std::int64_t>(group.lanes) * kCount;
  if (table.target != RowTarget::kStep) {
    const std::int64_t place = table.target == RowTarget::kByRow ? row : run - table.first_run;
    for (std::int64_t column = first; column < columns; column += width) {
      float g[kCount] = {};
      sum(column, g);
      float* to = table.sums + place * columns + column;
      store_floats<kCount>(to, reinterpret_cast<std::uintptr_t>(to) % 16 == 0, g);
    }
    return;
  }
  if (columns <= width) {
    Part<kCount> part = {};
    const bool has_part = first < columns;
    if (has_part) {
      load_part<kElement, kCount, kFull>(table, row, first, part);
      sum(first, part.g);
      decay(table.step, part);
    }
    const RowNumbers numbers =
        row_numbers<kCount, kFull>(table, row, group, [&](const auto& body) { body(part); });
    if (has_part) {
      step_part<kCount, kFull>(table.step, numbers, part);
      store_part<kElement, kCount, kFull>(table, row, first, part);
    }
    return;
  }
  const auto load = [&](std::int64_t column, Part<kCount>& part) {
    load_part<kElement, kCount, kFull>(table, row, column, part);
#pragma unroll
    for (int c = 0; c < kCount; ++c) part.g[c] = 0;
    sum(column, part.g);
    decay(table.step, part);
  };
  const RowNumbers numbers = row_numbers<kCount, kFull>(table, row, group, [&](const auto& body) {
    for (std::int64_t column = first; column < columns; column += width) {
      Part<kCount> part = {};
      load(column, part);
      body(part);
    }
  });
  for (std::int64_t column = first; column < columns; column += width) {
    Part<kCount> part = {};
    load(column, part);
    step_part<kCount, kFull>(table.step, numbers, part);
    store_part<kElement, kCount, kFull>(table, row, column, part);
  }
}

/// Whether this instantiation is the one for the table.
template <Element kElement, int kCount, bool kFull>
__host__ __device__ bool is_for(const TableSteps& table) {
  const int wide = kElement == Element::kFloat32 ? 4 : 8;
  const bool fits = table.rows.num_columns % wide == 0 &&
                    reinterpret_cast<std::uintptr_t>(table.rows.data) % 16 == 0;
  const bool is_full = table.target == RowTarget::kStep && has_full_momentum1(table.step.rule);
  return table.rows.element == kElement && fits == (kCount > 1) && is_full == kFull &&
         table.rows.num_rows > 0;
}

/// Whether the light kernel takes the table.
template <Element kElement, int kCount>
__host__ __device__ bool is_light(const TableSteps& table) {
  return is_for<kElement, kCount, false>(table) && table.target == RowTarget::kStep &&
         table.rows.num_columns <= 32 * kCount;
}

template <Element kElement, int kCount, bool kFull>
__host__ __device__ bool is_heavy(const TableSteps& table) {
  return is_for<kElement, kCount, kFull>(table) && !is_light<kElement, kCount>(table);
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

/// Rules without state per element, for rows that one group of lanes holds: most of training. What
/// is needed to find a row, its gradient and its state is read by one lane per run, 32 runs at a
/// time; then groups of lanes have the rows of several runs on their way at once.
template <Element kElement, int kCount>
__global__ void __launch_bounds__(kThreads, 2)
    light_kernel(TableCall call, SortedRows sorted, const TableSteps* tables, int num_tables,
                 const float* gradient, float limit, int lanes, std::uint32_t* long_runs) {
  using Form = Stored<kElement>;
  constexpr int kRuns = kLightRuns<kCount>;
  __shared__ std::uint32_t shared_keys[kSharedTables];
  const bool is_shared = num_tables <= kSharedTables;
  if (is_shared) {
    for (int i = static_cast<int>(threadIdx.x); i < num_tables; i += kThreads) {
      shared_keys[i] = tables[i].first_key;
    }
  }
  __syncthreads();
  const std::uint32_t num_runs = *sorted.num_runs;
  const int in_warp = static_cast<int>(threadIdx.x) % 32;
  const int groups = 32 / lanes;
  const int column = in_warp % lanes * kCount;
  const unsigned mask = lanes == 32 ? ~0U : ((1U << lanes) - 1U) << (in_warp / lanes * lanes);
  const std::uint32_t warps = gridDim.x * (kThreads / 32);
  for (std::uint32_t first = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * 32;
       first < num_runs; first += warps * 32) {
    const std::uint32_t own = first + in_warp;
    std::uint32_t begin = 0;
    std::uint32_t count = 0;  // 0: not for this kernel
    std::uint32_t row = 0;
    int owner = 0;
    Source source{gradient, 0.0F};
    Source second{gradient, 0.0F};
    float h = 0;
    if (own < num_runs) {
      begin = sorted.run_starts[own];
      const std::uint32_t end = own + 1 < num_runs ? sorted.run_starts[own + 1]
                                                   : static_cast<std::uint32_t>(sorted.num_entries);
      const std::uint32_t key = sorted.keys[begin];
      owner = is_shared ? table_of_key(shared_keys, num_tables, key)
                        : table_of_steps(tables, num_tables, key);
      const TableSteps& table = tables[owner];
      if (key != ~0U && is_light<kElement, kCount>(table)) {
        row = key - table.first_key;
        count = end - begin;
        if (count > long_run()) {
          long_runs[1 + atomicAdd(long_runs, 1U)] = own;
          count = 0;
        } else {
          source = source_at(call, sorted, gradient, sorted.values[begin]);
          if (count > 1) second = source_at(call, sorted, gradient, sorted.values[begin + 1]);
          if (table.step.rule == RowRule::kRowWiseAdagrad) h = table.state.momentum1[row];
        }
      }
    }
    for (int base = 0; base < 32; base += groups * kRuns) {
      Pack<typename Form::Type, kCount> rows[kRuns];
      float parts[kRuns][kCount];
      float others[kRuns][kCount];
      std::uint32_t run_row[kRuns];
      std::uint32_t run_count[kRuns];
      int run_owner[kRuns];
#pragma unroll
      for (int u = 0; u < kRuns; ++u) {
        const int i = (base + u * groups + in_warp / lanes) % 32;
        run_count[u] = __shfl_sync(~0U, count, i);
        run_row[u] = __shfl_sync(~0U, row, i);
        run_owner[u] = __shfl_sync(~0U, owner, i);
        const auto from = __shfl_sync(
            ~0U, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(source.data)), i);
        const auto from_second = __shfl_sync(
            ~0U, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(second.data)), i);
        if (base + u * groups >= 32) run_count[u] = 0;
        const TableSteps& table = tables[run_owner[u]];
        if (run_count[u] > 0 && column < table.rows.num_columns) {
          rows[u] = load_pack<kCount>(
              static_cast<const typename Form::Type*>(table.rows.data) +
              static_cast<std::int64_t>(run_row[u]) * table.rows.num_columns + column);
          const float* at = reinterpret_cast<const float*>(from) + column;
          load_floats<kCount>(at, reinterpret_cast<std::uintptr_t>(at) % 16 == 0, parts[u]);
          if (run_count[u] > 1) {
            at = reinterpret_cast<const float*>(from_second) + column;
            load_floats<kCount>(at, reinterpret_cast<std::uintptr_t>(at) % 16 == 0, others[u]);
          }
        } else {
          rows[u] = {};
#pragma unroll
          for (int c = 0; c < kCount; ++c) parts[u][c] = 0;
        }
      }
#pragma unroll
      for (int u = 0; u < kRuns; ++u) {
        const int i = (base + u * groups + in_warp / lanes) % 32;
        const float factor = __shfl_sync(~0U, source.factor, i);
        const float second_factor = __shfl_sync(~0U, second.factor, i);
        const std::uint32_t run_begin = __shfl_sync(~0U, begin, i);
        float run_h = __shfl_sync(~0U, h, i);
        if (run_count[u] == 0) continue;
        const TableSteps& table = tables[run_owner[u]];
        const RowStep& step = table.step;
        const bool has_part = column < table.rows.num_columns;
        Part<kCount> part;
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          part.w[c] = Form::widen(rows[u].values[c]);
          part.g[c] = factor * within(parts[u][c], limit);
        }
        if (run_count[u] > 1) {
#pragma unroll
          for (int c = 0; c < kCount; ++c) {
            if (has_part) part.g[c] += second_factor * within(others[u][c], limit);
          }
        }
        if (run_count[u] > 2) {
          add_together<kCount>(call, sorted, gradient, limit, run_begin + 2,
                               run_begin + run_count[u], lanes, mask, has_part, column, part.g);
        }
        decay(step, part);
        float rate = step.rate;
        if (step.rule == RowRule::kRowWiseAdagrad) {
          float square = 0;
#pragma unroll
          for (int c = 0; c < kCount; ++c) square += has_part ? part.g[c] * part.g[c] : 0.0F;
          run_h += sum_lanes(square, lanes, mask) / static_cast<float>(table.rows.num_columns);
          if (column == 0) table.state.momentum1[run_row[u]] = run_h;
          rate = step.rate / (sqrtf(run_h) + step.eps);
        }
#pragma unroll
        for (int c = 0; c < kCount; ++c) part.w[c] -= rate * part.g[c];
        if (has_part) store_part<kElement, kCount, false>(table, run_row[u], column, part);
      }
    }
  }
}

/// A warp takes 32 runs at a time: its lanes read where they begin and to whom they belong, then
/// groups of lanes step them one by one. `lanes` is the widest group any table here needs.
template <Element kElement, int kCount, bool kFull>
__global__ void __launch_bounds__(kThreads, kCount > 1 ? 2 : 3)
    step_kernel(TableCall call, SortedRows sorted, const TableSteps* tables, int num_tables,
                const float* gradient, float limit, int lanes, std::uint32_t* long_runs) {
  __shared__ std::uint32_t shared_keys[kSharedTables];
  const bool is_shared = num_tables <= kSharedTables;
  if (is_shared) {
    for (int i = static_cast<int>(threadIdx.x); i < num_tables; i += kThreads) {
      shared_keys[i] = tables[i].first_key;
    }
  }
  __syncthreads();
  const std::uint32_t num_runs = *sorted.num_runs;
  const int in_warp = static_cast<int>(threadIdx.x) % 32;
  Group group;
  group.lanes = lanes;
  group.lane = in_warp % lanes;
  group.mask = lanes == 32 ? ~0U : ((1U << lanes) - 1U) << (in_warp / lanes * lanes);
  const std::uint32_t warps = gridDim.x * (kThreads / 32);
  for (std::uint32_t first = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * 32;
       first < num_runs; first += warps * 32) {
    const std::uint32_t own = first + in_warp;
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    std::uint32_t key = ~0U;
    int owner = 0;
    if (own < num_runs) {
      begin = sorted.run_starts[own];
      end = own + 1 < num_runs ? sorted.run_starts[own + 1]
                               : static_cast<std::uint32_t>(sorted.num_entries);
      key = sorted.keys[begin];
      owner = is_shared ? table_of_key(shared_keys, num_tables, key)
                        : table_of_steps(tables, num_tables, key);
      // Tables without rows share their first key with the next table: the search finds the last.
      // The light kernel notes the long runs of its own tables: noted twice, a row is stepped
      // twice.
      if (key != ~0U && end - begin > long_run() &&
          is_heavy<kElement, kCount, kFull>(tables[owner])) {
        long_runs[1 + atomicAdd(long_runs, 1U)] = own;
        key = ~0U;
      }
    }
    const int groups = 32 / lanes;
    for (int i = in_warp / lanes; i < 32; i += groups) {
      const std::uint32_t run_key = __shfl_sync(~0U, key, i);
      const std::uint32_t run_begin = __shfl_sync(~0U, begin, i);
      const std::uint32_t run_end = __shfl_sync(~0U, end, i);
      const int run_owner = __shfl_sync(~0U, owner, i);
      if (run_key == ~0U) continue;
      const TableSteps& table = tables[run_owner];
      if (!is_heavy<kElement, kCount, kFull>(table)) continue;
      finish_row<kElement, kCount, kFull>(
          table, run_key - table.first_key, first + i, group, [&](std::int64_t column, float* g) {
            add_entries<kCount>(call, sorted, gradient, limit, run_begin, run_end, column, g);
          });
    }
  }
}

/// One block per long run: its warps add shares of the entries, the first finishes.
template <Element kElement, int kCount, bool kFull>
__global__ void __launch_bounds__(kThreads, 1)
    long_kernel(TableCall call, SortedRows sorted, const TableSteps* tables, int num_tables,
                const float* gradient, float limit, const std::uint32_t* long_runs) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float parts[kWarps][32 * kCount];
  const std::uint32_t count = long_runs[0];
  const std::uint32_t num_runs = *sorted.num_runs;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Group group;
  group.lanes = 32;
  group.lane = static_cast<int>(threadIdx.x) % 32;
  group.mask = ~0U;
  for (std::uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    const std::uint32_t run = long_runs[1 + i];
    const std::uint32_t begin = sorted.run_starts[run];
    const std::uint32_t end = run + 1 < num_runs ? sorted.run_starts[run + 1]
                                                 : static_cast<std::uint32_t>(sorted.num_entries);
    const std::uint32_t key = sorted.keys[begin];
    int owner = num_tables - 1;
    while (tables[owner].first_key > key) --owner;
    const TableSteps& table = tables[owner];
    if (!is_for<kElement, kCount, kFull>(table)) continue;
    const std::int64_t columns = table.rows.num_columns;
    const std::uint32_t size = end - begin;
    const std::uint32_t from =
        begin + static_cast<std::uint32_t>(static_cast<std::uint64_t>(size) * warp / kWarps);
    const std::uint32_t to =
        begin + static_cast<std::uint32_t>(static_cast<std::uint64_t>(size) * (warp + 1) / kWarps);
    // All warps compute every piece of columns together; the first one then has its sum.
    const auto sum_together = [&](std::int64_t column, float* g) {
      float own[kCount] = {};
      add_together<kCount>(call, sorted, gradient, limit, from, to, 32, ~0U, column < columns,
                           column, own);
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kCount; ++c) parts[warp][group.lane * kCount + c] = own[c];
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) g[c] += parts[w][group.lane * kCount + c];
      }
    };
    if (columns <= 32 * kCount) {
      float sums[kCount] = {};
      sum_together(static_cast<std::int64_t>(group.lane) * kCount, sums);
      if (warp == 0) {
        finish_row<kElement, kCount, kFull>(table, key - table.first_key, run, group,
                                            [&](std::int64_t, float* g) {
#pragma unroll
                                              for (int c = 0; c < kCount; ++c) g[c] += sums[c];
                                            });
      }
    } else if (warp == 0) {
      // Wide and often: rare enough to be slow.
      finish_row<kElement, kCount, kFull>(
          table, key - table.first_key, run, group, [&](std::int64_t column, float* g) {
            add_entries<kCount>(call, sorted, gradient, limit, begin, end, column, g);
          });
    }
    __syncthreads();
  }
}

template <Element kElement, int kCount, bool kFull>
int start_steps(const TableCall& call, const SortedRows& sorted, const TableSteps* tables,
                const TableSteps* host_tables, int num_tables, const float* gradient, float limit,
                std::uint32_t* long_runs, int blocks, cudaStream_t stream) {
  int light_lanes = 0;
  int lanes = 0;
  for (int i = 0; i < num_tables; ++i) {
    const int needed = lanes_for(host_tables[i].rows.num_columns, kCount);
    if (!kFull && is_light<kElement, kCount>(host_tables[i])) {
      light_lanes = std::max(light_lanes, needed);
    } else if (is_heavy<kElement, kCount, kFull>(host_tables[i])) {
      lanes = std::max(lanes, needed);
    }
  }
  if (lanes == 0 && light_lanes == 0) return 0;
  if (const int error = cudaMemsetAsync(long_runs, 0, 4, stream); error != 0) return error;
  if constexpr (!kFull) {
    if (light_lanes > 0) {
      light_kernel<kElement, kCount><<<blocks, kThreads, 0, stream>>>(
          call, sorted, tables, num_tables, gradient, limit, light_lanes, long_runs);
    }
  }
  if (lanes > 0) {
    step_kernel<kElement, kCount, kFull><<<blocks, kThreads, 0, stream>>>(
        call, sorted, tables, num_tables, gradient, limit, lanes, long_runs);
  }
  if (sorted.num_entries > long_run()) {
    long_kernel<kElement, kCount, kFull><<<256, kThreads, 0, stream>>>(
        call, sorted, tables, num_tables, gradient, limit, long_runs);
  }
  return cudaGetLastError();
}

}  // namespace

std::size_t sort_bytes(std::int64_t num_positions) {
  return SortMemory(std::max<std::int64_t>(num_positions, 1)).bytes;
}

int sort_rows(const TableCall& call, const std::int32_t* table_of, const std::uint32_t* first_keys,
              std::int64_t num_keys, bool keep_bags, void* work, SortedRows* sorted, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  const SortMemory memory(std::max<std::int64_t>(call.num_positions, 1));
  char* const base = static_cast<char*>(work);
  const auto array = [&](std::size_t at) { return reinterpret_cast<std::uint32_t*>(base + at); };
  const auto n = static_cast<int>(call.num_positions);
  fill_kernel<<<static_cast<unsigned>(call.num_bags / (kThreads / 32) + 1), kThreads, 0, queue>>>(
      call, table_of, first_keys, keep_bags, array(memory.keys), array(memory.values),
      array(memory.bag_of));
  std::size_t bytes = memory.sort_bytes;
  // One bit more than the keys have, for the key of no row.
  const int bits =
      std::min(32, static_cast<int>(std::bit_width(static_cast<std::uint64_t>(num_keys))) + 1);
  if (const int error = cub::DeviceRadixSort::SortPairs(
          base + memory.temporary, bytes, array(memory.keys), array(memory.sorted_keys),
          array(memory.values), array(memory.sorted_values), n, 0, bits, queue);
      error != 0) {
    return error;
  }
  bytes = memory.select_bytes;
  if (const int error = cub::DeviceSelect::Flagged(
          base + memory.temporary, bytes, thrust::counting_iterator<std::uint32_t>(0),
          thrust::make_transform_iterator(thrust::counting_iterator<std::uint32_t>(0),
                                          IsStart{array(memory.sorted_keys)}),
          array(memory.starts), array(memory.count), n, queue);
      error != 0) {
    return error;
  }
  sorted->keys = array(memory.sorted_keys);
  sorted->values = array(memory.sorted_values);
  sorted->run_starts = array(memory.starts);
  sorted->num_runs = array(memory.count);
  sorted->num_entries = call.num_positions;
  sorted->bag_of = keep_bags ? array(memory.bag_of) : nullptr;
  return cudaGetLastError();
}

int step_sorted_rows(const TableCall& call, const SortedRows& sorted, const TableSteps* tables,
                     const TableSteps* host_tables, int num_tables, const float* gradient,
                     float limit, std::uint32_t* long_runs, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  const std::int64_t warps = (sorted.num_entries + 31) / 32;
  const int blocks = static_cast<int>(
      std::min<std::int64_t>((warps + kThreads / 32 - 1) / (kThreads / 32), 132 * 16));
  const auto start = [&](auto run) {
    return run(call, sorted, tables, host_tables, num_tables, gradient, limit, long_runs, blocks,
               queue);
  };
  int error = 0;
  const auto next = [&](auto run) {
    if (error == 0) error = start(run);
  };
  next(start_steps<Element::kFloat32, 4, false>);
  next(start_steps<Element::kFloat32, 1, false>);
  next(start_steps<Element::kFloat32, 4, true>);
  next(start_steps<Element::kFloat32, 1, true>);
  next(start_steps<Element::kFloat16, 8, false>);
  next(start_steps<Element::kFloat16, 1, false>);
  next(start_steps<Element::kFloat16, 8, true>);
  next(start_steps<Element::kFloat16, 1, true>);
  next(start_steps<Element::kBFloat16, 8, false>);
  next(start_steps<Element::kBFloat16, 1, false>);
  next(start_steps<Element::kBFloat16, 8, true>);
  next(start_steps<Element::kBFloat16, 1, true>);
  return error;
}

}  // namespace tessera::kernels::cuda
