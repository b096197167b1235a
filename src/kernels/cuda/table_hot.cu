// Steps the rows of light tables that occur often in a batch, on CUDA. A warp adds the gradients of
// one row, eight of them on their way at a time. A row that occurs very often is cut into segments:
// warps anywhere on the device add one each, then a block adds the segments' sums, first in fixed
// shares, then as a tree in shared memory. Which segment is added by whom does not matter; in which
// order they are added depends on the number of entries alone, so equal input gives equal bits.

#include <algorithm>

#include "kernels/cuda/table_entries.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
// Blocks that a multiprocessor should hold: as many as registers allow without spilling.
template <int kPacks>
constexpr int kResident = kPacks == 1 ? 5 : 4;
/// Runs whose places a warp looks up at once.
constexpr int kTogether = 4;

/// Which columns of a row belong to a lane of a group.
template <int kCount, int kPacks>
struct Columns {
  int lanes;   // of a group
  int groups;  // of a warp; each adds other entries
  int group;
  int at[kPacks];
  bool is_mine[kPacks];

  explicit __device__ Columns(int num_columns, bool whole_warp = false) {
    lanes = whole_warp ? 32 : lanes_for((num_columns + kPacks - 1) / kPacks, kCount);
    groups = 32 / lanes;
    const int in_warp = static_cast<int>(threadIdx.x % 32);
    group = in_warp / lanes;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      at[p] = (p * lanes + in_warp % lanes) * kCount;
      is_mine[p] = at[p] < num_columns;
      if (!is_mine[p]) at[p] = num_columns - kCount;
    }
  }
};

template <int kCount, int kPacks>
using Sums = float[kPacks][kCount];

/// Adds the gradients of entries begin .. end - 1. Every lane ends with the sum at its columns.
template <int kCount, int kPacks>
__device__ __forceinline__ void add_run(const TableCall& call, const SortedRows& sorted,
                                        const float* gradient, float limit, bool is_aligned,
                                        std::uint32_t begin, std::uint32_t end,
                                        const Columns<kCount, kPacks>& columns,
                                        Sums<kCount, kPacks>& sums) {
  constexpr int kFlight = 8 / kPacks;
  const unsigned in_warp = threadIdx.x % 32;
  std::uint32_t value = begin + in_warp < end ? sorted.values[begin + in_warp] : 0;
  for (std::uint32_t base = begin; base < end; base += 32) {
    const int count = static_cast<int>(min(end - base, 32U));
    Source own{gradient, 0.0F};
    if (in_warp < count) own = source_at(call, sorted, gradient, value);
    // Those of the next round are read while this one is added.
    if (base + 32 + in_warp < end) value = sorted.values[base + 32 + in_warp];
    for (int k = 0; k < count; k += columns.groups * kFlight) {
      float parts[kFlight][kPacks][kCount];
      float factors[kFlight];
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        const int i = k + u * columns.groups + columns.group;
        const auto from = reinterpret_cast<const float*>(__shfl_sync(
            ~0U, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(own.data)),
            min(i, count - 1)));
        factors[u] = __shfl_sync(~0U, own.factor, min(i, count - 1));
        if (i >= count) continue;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          load_floats<kCount>(from + columns.at[p], is_aligned, parts[u][p]);
        }
      }
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (k + u * columns.groups + columns.group >= count) continue;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
#pragma unroll
          for (int c = 0; c < kCount; ++c) {
            sums[p][c] += factors[u] * within(parts[u][p][c], limit);
          }
        }
      }
    }
  }
  for (int offset = columns.lanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) sums[p][c] += __shfl_xor_sync(~0U, sums[p][c], offset);
    }
  }
}

/// One row in registers, read before its gradients are added.
template <Element kElement, int kCount, int kPacks>
struct Row {
  std::int64_t number;
  float state;
  Pack<typename Stored<kElement>::Type, kCount> packs[kPacks];

  __device__ Row(const TableSteps& table, std::int64_t row, const Columns<kCount, kPacks>& columns)
      : number(row) {
    const bool has_state = table.step.rule == RowRule::kRowWiseAdagrad;
    state = has_state ? table.state.momentum1[row] : 0.0F;
    const auto* const data = static_cast<const typename Stored<kElement>::Type*>(table.rows.data) +
                             row * table.rows.num_columns;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) packs[p] = load_pack<kCount>(data + columns.at[p]);
  }

  /// By a whole warp; the lanes of the first group write.
  __device__ __forceinline__ void step(const TableSteps& table,
                                       const Columns<kCount, kPacks>& columns,
                                       Sums<kCount, kPacks>& sums) const {
    using Form = Stored<kElement>;
    const RowStep& step = table.step;
    float square = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        if (step.decay != 0.0F && !step.is_decoupled) {
          sums[p][c] += step.decay * Form::widen(packs[p].values[c]);
        }
        square += columns.is_mine[p] ? sums[p][c] * sums[p][c] : 0.0F;
      }
    }
    float rate = step.rate;
    if (step.rule == RowRule::kRowWiseAdagrad) {
      square = sum_lanes(square, columns.lanes, ~0U);
      const float h = state + square / static_cast<float>(table.rows.num_columns);
      rate = step.rate / (sqrtf(h) + step.eps);
      __syncwarp();  // all have read what is written now
      if (threadIdx.x % 32 == 0) table.state.momentum1[number] = h;
    }
    if (columns.group != 0) return;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!columns.is_mine[p]) continue;
      float w[kCount];
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        w[c] = Form::widen(packs[p].values[c]);
        if (step.decay != 0.0F && step.is_decoupled) w[c] *= 1.0F - step.rate * step.decay;
        w[c] -= rate * sums[p][c];
      }
      store_row<kElement, kCount>(table, number, columns.at[p], w);
    }
  }
};

/// A run, or a segment of one, and the table it belongs to.
struct Task {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  std::uint32_t row = 0;
  int owner = -1;  // -1: another kernel's
};

template <Element kElement, int kCount, int kPacks>
__device__ __forceinline__ Task task_of(const SortedRows& sorted, const TableSteps* tables,
                                        int num_tables, std::uint32_t run) {
  Task task;
  task.begin = sorted.run_starts[run];
  task.end = run + 1 < *sorted.num_runs ? sorted.run_starts[run + 1] : *sorted.count;
  const std::uint32_t key = sorted.keys[task.begin];
  const int owner = table_of_steps(tables, num_tables, key);
  if (!is_light_kind<kElement, kCount, kPacks>(tables[owner])) return task;
  task.owner = owner;
  task.row = key - tables[owner].first_key;
  return task;
}

/// Adds segments; adds and steps runs that are not cut.
template <Element kElement, int kCount, int kPacks>
__global__ void __launch_bounds__(kThreads, kResident<kPacks>)
    hot_kernel(TableCall call, SortedRows sorted, const TableSteps* tables, int num_tables,
               const float* gradient, float limit, bool is_aligned, RunLists lists) {
  const std::uint32_t num_segments = lists.counts[kSegments];
  const std::uint32_t num_medium = lists.counts[kMedium];
  const std::uint32_t warp = blockIdx.x * kWarps + threadIdx.x / 32;
  const std::uint32_t num_warps = gridDim.x * kWarps;
  const int in_warp = static_cast<int>(threadIdx.x % 32);
  // The longest first.
  for (std::uint32_t i = warp; i < num_segments; i += num_warps) {
    const Task task =
        task_of<kElement, kCount, kPacks>(sorted, tables, num_tables, lists.segments[2 * i]);
    if (task.owner < 0) continue;
    const Columns<kCount, kPacks> columns(static_cast<int>(tables[task.owner].rows.num_columns));
    const std::uint32_t begin = task.begin + lists.segments[2 * i + 1] * kSegment;
    Sums<kCount, kPacks> sums = {};
    add_run<kCount, kPacks>(call, sorted, gradient, limit, is_aligned, begin,
                            min(begin + kSegment, task.end), columns, sums);
    if (columns.group != 0) continue;
    float* const to = lists.sums + i * lists.width;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!columns.is_mine[p]) continue;
#pragma unroll
      for (int c = 0; c < kCount; ++c) to[columns.at[p] + c] = sums[p][c];
    }
  }
  // Warps that have had a segment more come last.
  const std::uint32_t turn = (warp + num_warps - num_segments % num_warps) % num_warps;
  for (std::uint32_t first = turn * kTogether; first < num_medium; first += num_warps * kTogether) {
    Task own;
    if (in_warp < kTogether && first + in_warp < num_medium) {
      own = task_of<kElement, kCount, kPacks>(sorted, tables, num_tables,
                                              lists.medium[first + in_warp]);
    }
    for (int i = 0; i < kTogether; ++i) {
      Task task;
      task.owner = __shfl_sync(~0U, own.owner, i);
      task.begin = __shfl_sync(~0U, own.begin, i);
      task.end = __shfl_sync(~0U, own.end, i);
      task.row = __shfl_sync(~0U, own.row, i);
      if (task.owner < 0) continue;
      const TableSteps& table = tables[task.owner];
      const Columns<kCount, kPacks> columns(static_cast<int>(table.rows.num_columns));
      const Row<kElement, kCount, kPacks> row(table, task.row, columns);
      Sums<kCount, kPacks> sums = {};
      add_run<kCount, kPacks>(call, sorted, gradient, limit, is_aligned, task.begin, task.end,
                              columns, sums);
      row.step(table, columns, sums);
    }
  }
}

/// One block per run that was cut.
template <Element kElement, int kCount, int kPacks>
__global__ void __launch_bounds__(kThreads, kResident<kPacks>)
    join_kernel(SortedRows sorted, const TableSteps* tables, int num_tables, RunLists lists) {
  __shared__ float shared[kWarps][32 * kPacks * kCount];
  const std::uint32_t num_cut = lists.counts[kCut];
  const int warp = static_cast<int>(threadIdx.x / 32);
  for (std::uint32_t i = blockIdx.x; i < num_cut; i += gridDim.x) {
    const std::uint32_t* const cut = lists.cut + 3 * static_cast<std::int64_t>(i);
    const Task task = task_of<kElement, kCount, kPacks>(sorted, tables, num_tables, cut[0]);
    if (task.owner < 0) continue;  // of the whole block
    const TableSteps& table = tables[task.owner];
    const Columns<kCount, kPacks> columns(static_cast<int>(table.rows.num_columns), true);
    Sums<kCount, kPacks> sums = {};
#pragma unroll 4
    for (std::uint32_t s = warp; s < cut[2]; s += kWarps) {
      const float* const from = lists.sums + (cut[1] + s) * lists.width;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) sums[p][c] += from[columns.at[p] + c];
      }
    }
    __syncthreads();  // what was shared for the run before has been read
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        shared[warp][(p * kCount + c) * 32 + threadIdx.x % 32] = sums[p][c];
      }
    }
    for (int half = kWarps / 2; half > 0; half /= 2) {
      __syncthreads();
      if (warp >= half) continue;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          const int at = (p * kCount + c) * 32 + static_cast<int>(threadIdx.x % 32);
          shared[warp][at] += shared[warp + half][at];
        }
      }
    }
    if (warp != 0) continue;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        sums[p][c] = shared[0][(p * kCount + c) * 32 + threadIdx.x % 32];
      }
    }
    const Row<kElement, kCount, kPacks> row(table, task.row, columns);
    row.step(table, columns, sums);
  }
}

}  // namespace

int step_hot_rows(const TableCall& call, const SortedRows& sorted, const TableSteps* tables,
                  const TableSteps* host_tables, int num_tables, const float* gradient, float limit,
                  const RunLists& lists, cudaStream_t stream) {
  const bool is_aligned = has_packed_gradients(call, gradient);
  // As many as there is work for, at most as many as are at work at the same time.
  const auto blocks = [&](std::int64_t entries_each, int resident) {
    const std::int64_t needed = (sorted.num_entries + entries_each - 1) / entries_each;
    return static_cast<int>(std::min<std::int64_t>(needed, resident * num_multiprocessors()));
  };
  const auto start = [&]<Element kElement, int kCount, int kPacks>() {
    if (std::none_of(host_tables, host_tables + num_tables,
                     is_light_kind<kElement, kCount, kPacks>)) {
      return;
    }
    hot_kernel<kElement, kCount, kPacks>
        <<<blocks(kWarps * kShortRun, kResident<kPacks>), kThreads, 0, stream>>>(
            call, sorted, tables, num_tables, gradient, limit, is_aligned, lists);
    if (sorted.num_entries > kSegment) {
      join_kernel<kElement, kCount, kPacks>
          <<<blocks(kSegment, kResident<kPacks>), kThreads, 0, stream>>>(sorted, tables, num_tables,
                                                                         lists);
    }
  };
  const auto start_all = [&]<Element kElement>() {
    start.template operator()<kElement, 4, 1>();
    start.template operator()<kElement, 4, 2>();
    start.template operator()<kElement, 1, 1>();
  };
  start_all.template operator()<Element::kFloat32>();
  start_all.template operator()<Element::kFloat16>();
  start_all.template operator()<Element::kBFloat16>();
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
