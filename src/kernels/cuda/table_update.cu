// Steps rows of tables on CUDA once they are sorted. A row belongs to one group of lanes, which
// adds in the order of the sorted entries. A row with very many entries belongs to a block instead,
// whose groups add fixed shares of them that are then added in order: slower to start, but no row
// holds up the others. Light tables have kernels of their own (table_light.cu, table_hot.cu).

#include <algorithm>

#include "kernels/cuda/table_entries.cuh"
#include "kernels/cuda/work_layout.h"

namespace tessera::kernels::cuda {
namespace {

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
  store_row<kElement, kCount>(table, row, column, part.w);
  const std::int64_t at = row * table.rows.num_columns + column;
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

/// Whether this instantiation is the one for the table. Light tables have kernels of their own.
template <Element kElement, int kCount, bool kFull>
__host__ __device__ bool is_for(const TableSteps& table) {
  const bool is_full = table.target == RowTarget::kStep && has_full_momentum1(table.step.rule);
  return table.rows.element == kElement && has_packs(table.rows) == (kCount > 1) &&
         is_full == kFull && table.rows.num_rows > 0 && !is_light(table);
}

/// A warp takes 32 runs at a time: its lanes read where they begin and to whom they belong, then
/// groups of lanes step them one by one. `lanes` is the widest group any table here needs.
template <Element kElement, int kCount, bool kFull>
__global__ void __launch_bounds__(kStepThreads, kCount > 1 ? 2 : 3)
    step_kernel(TableCall call, SortedRows sorted, const TableSteps* tables, int num_tables,
                const float* gradient, float limit, int lanes, RunLists lists) {
  __shared__ std::uint32_t shared_keys[kSharedTables];
  const bool is_shared = num_tables <= kSharedTables;
  if (is_shared) {
    for (int i = static_cast<int>(threadIdx.x); i < num_tables; i += kStepThreads) {
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
  const std::uint32_t warps = gridDim.x * (kStepThreads / 32);
  for (std::uint32_t first = (blockIdx.x * (kStepThreads / 32) + threadIdx.x / 32) * 32;
       first < num_runs; first += warps * 32) {
    const std::uint32_t own = first + in_warp;
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    std::uint32_t key = ~0U;
    int owner = 0;
    if (own < num_runs) {
      begin = sorted.run_starts[own];
      end = own + 1 < num_runs ? sorted.run_starts[own + 1] : *sorted.count;
      key = sorted.keys[begin];
      owner = is_shared ? table_of_key(shared_keys, num_tables, key)
                        : table_of_steps(tables, num_tables, key);
      // Tables without rows share their first key with the next table: the search finds the last.
      // Each kernel notes the long runs of its own tables: noted twice, a row is stepped twice.
      if (key != ~0U && end - begin > kLongRun && is_for<kElement, kCount, kFull>(tables[owner])) {
        lists.heavy[atomicAdd(lists.counts + kHeavy, 1U)] = own;
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
      if (!is_for<kElement, kCount, kFull>(table)) continue;
      finish_row<kElement, kCount, kFull>(
          table, run_key - table.first_key, first + i, group, [&](std::int64_t column, float* g) {
            add_entries<kCount>(call, sorted, gradient, limit, run_begin, run_end, column, g);
          });
    }
  }
}

/// One block per long run: its warps add shares of the entries, the first finishes.
template <Element kElement, int kCount, bool kFull>
__global__ void __launch_bounds__(kStepThreads, 1)
    long_kernel(TableCall call, SortedRows sorted, const TableSteps* tables, int num_tables,
                const float* gradient, float limit, RunLists lists) {
  constexpr int kWarps = kStepThreads / 32;
  __shared__ float parts[kWarps][32 * kCount];
  const std::uint32_t count = lists.counts[kHeavy];
  const std::uint32_t num_runs = *sorted.num_runs;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Group group;
  group.lanes = 32;
  group.lane = static_cast<int>(threadIdx.x) % 32;
  group.mask = ~0U;
  for (std::uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    const std::uint32_t run = lists.heavy[i];
    const std::uint32_t begin = sorted.run_starts[run];
    const std::uint32_t end = run + 1 < num_runs ? sorted.run_starts[run + 1] : *sorted.count;
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
      add_together<kCount, 32 / kCount>(call, sorted, gradient, limit, from, to, 32, ~0U,
                                        column < columns, column, own);
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

/// How the work memory is cut: each list has room for as many as there can be.
struct StepMemory {
  std::size_t counts, heavy, medium, segments, cut, sums, bytes;
  std::int64_t width;

  StepMemory(std::int64_t num_entries, std::int64_t max_columns) : width(max_columns) {
    WorkLayout work;
    const std::int64_t num_cut = num_entries / kSegment;
    counts = work.take_numbers(kRunCounts);
    heavy = work.take_numbers(num_entries / kLongRun + 1);
    medium = work.take_numbers(num_entries / kShortRun + 1);
    segments = work.take_numbers(2 * (2 * num_cut));  // the last one of a run may be short
    cut = work.take_numbers(3 * num_cut);
    sums = work.take_numbers(2 * num_cut * width);
    bytes = work.bytes();
  }

  RunLists lists(char* base) const {
    const auto list = arrays_in(base);
    return {list(counts),   list(heavy), list(medium),
            list(segments), list(cut),   reinterpret_cast<float*>(base + sums),
            width};
  }
};

/// Calls body<element, numbers per lane, state per element>() for every kind of table.
template <typename Body>
int for_each_kind(const Body& body) {
  int error = 0;
  const auto both = [&]<Element kElement, int kCount>() {
    if (error == 0) error = body.template operator()<kElement, kCount, false>();
    if (error == 0) error = body.template operator()<kElement, kCount, true>();
  };
  both.template operator()<Element::kFloat32, 4>();
  both.template operator()<Element::kFloat32, 1>();
  both.template operator()<Element::kFloat16, 8>();
  both.template operator()<Element::kFloat16, 1>();
  both.template operator()<Element::kBFloat16, 8>();
  both.template operator()<Element::kBFloat16, 1>();
  return error;
}

}  // namespace

std::size_t step_bytes(std::int64_t num_entries, std::int64_t max_columns) {
  return StepMemory(num_entries, std::min<std::int64_t>(max_columns, kLightColumns)).bytes;
}

int step_sorted_rows(const TableCall& call, const SortedRows& sorted, const TableSteps* tables,
                     const TableSteps* host_tables, int num_tables, const float* gradient,
                     float limit, void* work, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  const std::int64_t warps = (sorted.num_entries + 31) / 32;
  const int blocks = static_cast<int>(
      std::min<std::int64_t>((warps + kStepThreads / 32 - 1) / (kStepThreads / 32), 132 * 16));
  std::int64_t max_columns = 0;
  for (int i = 0; i < num_tables; ++i) {
    if (is_light(host_tables[i]))
      max_columns = std::max(max_columns, host_tables[i].rows.num_columns);
  }
  const RunLists lists =
      StepMemory(sorted.num_entries, max_columns).lists(static_cast<char*>(work));
  if (const int error = cudaMemsetAsync(lists.counts, 0, 4 * kRunCounts, queue); error != 0) {
    return error;
  }
  if (const int error = step_light_rows(call, sorted, tables, host_tables, num_tables, gradient,
                                        limit, lists, queue);
      error != 0) {
    return error;
  }
  if (sorted.num_entries > kShortRun) {
    if (const int error = step_hot_rows(call, sorted, tables, host_tables, num_tables, gradient,
                                        limit, lists, queue);
        error != 0) {
      return error;
    }
  }
  const int error = for_each_kind([&]<Element kElement, int kCount, bool kFull>() -> int {
    int lanes = 0;
    for (int i = 0; i < num_tables; ++i) {
      if (!is_for<kElement, kCount, kFull>(host_tables[i])) continue;
      lanes = std::max(lanes, lanes_for(host_tables[i].rows.num_columns, kCount));
    }
    if (lanes == 0) return 0;
    step_kernel<kElement, kCount, kFull><<<blocks, kStepThreads, 0, queue>>>(
        call, sorted, tables, num_tables, gradient, limit, lanes, lists);
    if (sorted.num_entries > kLongRun) {
      long_kernel<kElement, kCount, kFull><<<256, kStepThreads, 0, queue>>>(
          call, sorted, tables, num_tables, gradient, limit, lists);
    }
    return cudaGetLastError();
  });
  return error;
}

}  // namespace tessera::kernels::cuda
