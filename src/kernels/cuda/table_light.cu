// Steps the rows of light tables on CUDA: plain SGD and row-wise Adagrad on rows that a warp holds,
// which is most of training. What bounds it is how many rows are on their way at once, so the inner
// loop is short and takes few registers: a warp takes 32 runs, each lane finds one row, its
// gradient and its state, and leaves them in shared memory; then groups of lanes step several runs
// at a time. Most rows occur once in a batch. Those that occur a few times go on a list, for a
// second kernel; those that occur often, on the lists of table_hot.cu.

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/cuda/table_entries.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
// Blocks that a multiprocessor should hold: as many as registers allow without spilling.
template <Element kElement, bool kPlain, bool kSeveral>
constexpr int kResident = kSeveral || !kPlain ? 4 : (kElement == Element::kFloat32 ? 6 : 7);

/// What a group of lanes must know to step a run.
struct alignas(16) Run {
  const float* gradient;  // of its first entry
  std::uint32_t row;
  float factor;
};

/// 32 runs in shared memory.
struct Runs {
  Run first[32];
  float state[32];  // row-wise Adagrad's sum of squares
  int owner[32];    // number of the table
};
/// Runs of several entries, and where the gradients of the further ones lie.
struct SeveralRuns : Runs {
  Source further[kShortRun - 1][32];
  std::uint32_t count[32];
};

/// Sums of several runs over the lanes of a group at once: with every exchange a lane keeps half of
/// them. The lane ends with the sum of run `lane / (lanes / kRuns)`.
template <int kRuns>
__device__ __forceinline__ float sum_runs(float (&sums)[kRuns], unsigned lane, unsigned lanes) {
#pragma unroll
  for (int half = kRuns / 2; half > 0; half /= 2) {
    const unsigned offset = lanes / kRuns * half;
    const bool is_upper = (lane & offset) != 0;
#pragma unroll
    for (int u = 0; u < half; ++u) {
      const float keep = is_upper ? sums[u + half] : sums[u];
      const float give = is_upper ? sums[u] : sums[u + half];
      sums[u] = keep + __shfl_xor_sync(~0U, give, offset);
    }
  }
  for (unsigned offset = lanes / kRuns / 2; offset > 0; offset /= 2) {
    sums[0] += __shfl_xor_sync(~0U, sums[0], offset);
  }
  return sums[0];
}

/// What stepping reads of a table, kept in registers while its runs are stepped: read through the
/// pointer it would be read again after every store.
template <Element kElement>
struct StepInfo {
  typename Stored<kElement>::Type* data;
  float* state;
  int num_columns;
  bool is_adagrad;
  float rate;
  float eps;

  explicit __device__ StepInfo(const TableSteps& table)
      : data(static_cast<typename Stored<kElement>::Type*>(table.rows.data)),
        state(table.state.momentum1),
        num_columns(static_cast<int>(table.rows.num_columns)),
        is_adagrad(table.step.rule == RowRule::kRowWiseAdagrad),
        rate(table.step.rate),
        eps(table.step.eps) {}
};

/// Whether a table's step is its rule and nothing else.
__host__ __device__ bool is_plain(const RowStep& step) {
  return step.decay == 0.0F && !step.is_stochastic;
}

/// Adds the third entries and those behind them, of kRuns runs at a time.
template <int kCount, int kPacks, int kRuns, bool kPlain, typename Clamped>
__device__ __forceinline__ void add_further(const SeveralRuns& runs, float limit,
                                            const int (&columns)[kPacks], const Clamped& clamped,
                                            float (&sums)[kRuns][kPacks][kCount]) {
  std::uint32_t most = 0;
#pragma unroll
  for (int u = 0; u < kRuns; ++u) most = max(most, runs.count[clamped(u)]);
  for (std::uint32_t j = 2; j < most; ++j) {
    float parts[kRuns][kPacks][kCount];
#pragma unroll
    for (int u = 0; u < kRuns; ++u) {
      if (j >= runs.count[clamped(u)]) continue;
      const float* const from = runs.further[j - 1][clamped(u)].data;
      const bool is_aligned = kPlain || reinterpret_cast<std::uintptr_t>(from) % 16 == 0;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        load_floats<kCount>(from + columns[p], is_aligned, parts[u][p]);
      }
    }
#pragma unroll
    for (int u = 0; u < kRuns; ++u) {
      if (j >= runs.count[clamped(u)]) continue;
      const float factor = runs.further[j - 1][clamped(u)].factor;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          const float x = parts[u][p][c];
          sums[u][p][c] += factor * (kPlain ? x : within(x, limit));
        }
      }
    }
  }
}

/// Steps runs begin .. end - 1 of `runs`, kRuns per group of lanes at a time. A lane has kPacks
/// packs of a row. Lanes and runs past the end read what the last one reads, and write nothing.
/// kPlain: no decay, no random rounding, no limit, and gradients begin at multiples of 16 bytes.
template <Element kElement, int kCount, int kPacks, int kRuns, bool kPlain, typename SomeRuns>
__device__ __forceinline__ void step_runs(const TableSteps& table, float limit,
                                          const SomeRuns& runs, int begin, int end) {
  constexpr bool kSeveral = std::is_same_v<SomeRuns, SeveralRuns>;
  using Form = Stored<kElement>;
  const StepInfo<kElement> info(table);
  // At least one lane per run, for the sums over runs.
  const int needed = lanes_for((info.num_columns + kPacks - 1) / kPacks, kCount);
  const unsigned lanes = needed < kRuns ? kRuns : needed;
  const int in_warp = static_cast<int>(threadIdx.x % 32);
  const int group = in_warp >> (31 - __clz(static_cast<int>(lanes)));
  const int groups = 32 >> (31 - __clz(static_cast<int>(lanes)));
  const unsigned lane = in_warp & (lanes - 1);
  int columns[kPacks];
  bool has_part[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    columns[p] = static_cast<int>(p * lanes + lane) * kCount;
    has_part[p] = columns[p] < info.num_columns;
    if (!has_part[p]) columns[p] = info.num_columns - kCount;
  }
  for (int base = begin; base < end; base += groups * kRuns) {
    const auto place = [&](int u) { return base + u * groups + group; };
    const auto clamped = [&](int u) { return min(place(u), end - 1); };
    const auto is_aligned = [](const float* from) {
      return kPlain || reinterpret_cast<std::uintptr_t>(from) % 16 == 0;
    };
    Pack<typename Form::Type, kCount> rows[kRuns][kPacks];
    float g[kRuns][kPacks][kCount];
    [[maybe_unused]] float second[kSeveral ? kRuns : 1][kPacks][kCount];
#pragma unroll
    for (int u = 0; u < kRuns; ++u) {
      const Run run = runs.first[clamped(u)];
      const auto* const row = info.data + static_cast<std::int64_t>(run.row) * info.num_columns;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        rows[u][p] = load_pack<kCount>(row + columns[p]);
        load_floats<kCount>(run.gradient + columns[p], is_aligned(run.gradient), g[u][p]);
        if constexpr (kSeveral) {
          const float* const from = runs.further[0][clamped(u)].data;
          load_floats<kCount>(from + columns[p], is_aligned(from), second[u][p]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kRuns; ++u) {
      const float factor = runs.first[clamped(u)].factor;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        float* const sums = g[u][p];
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          sums[c] = factor * (kPlain ? sums[c] : within(sums[c], limit));
        }
        if constexpr (kSeveral) {
          const float more = runs.further[0][clamped(u)].factor;
#pragma unroll
          for (int c = 0; c < kCount; ++c) {
            const float x = second[u][p][c];
            sums[c] += more * (kPlain ? x : within(x, limit));
          }
        }
      }
    }
    if constexpr (kSeveral) {
      add_further<kCount, kPacks, kRuns, kPlain>(runs, limit, columns, clamped, g);
    }
    float squares[kRuns];
#pragma unroll
    for (int u = 0; u < kRuns; ++u) {
      squares[u] = 0;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        float* const sums = g[u][p];
        float square = 0;
        if (!kPlain && table.step.decay != 0.0F && !table.step.is_decoupled) {
#pragma unroll
          for (int c = 0; c < kCount; ++c) {
            sums[c] += table.step.decay * Form::widen(rows[u][p].values[c]);
          }
        }
#pragma unroll
        for (int c = 0; c < kCount; ++c) square += sums[c] * sums[c];
        squares[u] += has_part[p] ? square : 0.0F;
      }
    }
    float rate = info.rate;
    if (info.is_adagrad) {
      if constexpr (kSeveral) __syncwarp();  // groups may have added entries each for itself
      const float square = sum_runs<kRuns>(squares, lane, lanes);
      const int own = place(static_cast<int>(lane / (lanes / kRuns)));
      const Run& run = runs.first[min(own, end - 1)];
      const float h = runs.state[min(own, end - 1)] + square / static_cast<float>(info.num_columns);
      rate = info.rate / (sqrtf(h) + info.eps);
      if (own < end && lane % (lanes / kRuns) == 0) info.state[run.row] = h;
    }
#pragma unroll
    for (int u = 0; u < kRuns; ++u) {
      const float run_rate =
          info.is_adagrad ? __shfl_sync(~0U, rate, group * lanes + u * (lanes / kRuns)) : rate;
      const std::uint32_t row = runs.first[clamped(u)].row;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (place(u) >= end || !has_part[p]) continue;
        float w[kCount];
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          w[c] = Form::widen(rows[u][p].values[c]);
          if (!kPlain && table.step.decay != 0.0F && table.step.is_decoupled) {
            w[c] *= 1.0F - table.step.rate * table.step.decay;
          }
          w[c] -= run_rate * g[u][p][c];
        }
        if constexpr (kPlain) {
          Pack<typename Form::Type, kCount> pack;
#pragma unroll
          for (int c = 0; c < kCount; ++c) pack.values[c] = Form::narrow(w[c]);
          store_pack<kCount>(
              info.data + static_cast<std::int64_t>(row) * info.num_columns + columns[p], pack);
        } else {
          store_row<kElement, kCount>(table, row, columns[p], w);
        }
      }
    }
  }
}

/// Which tables a light kernel takes. `takes_all`: also those of which only the step is plain.
template <Element kElement, int kCount, int kPacks, bool kPlain>
__host__ __device__ bool is_for(const TableSteps& table, bool takes_all) {
  return is_light_kind<kElement, kCount, kPacks>(table) &&
         (takes_all || is_plain(table.step) == kPlain);
}

/// Puts the items of the lanes that ask for it behind each other in a list.
__device__ __forceinline__ void list_items(bool asks, std::uint32_t item, std::uint32_t* count,
                                           std::uint32_t* list) {
  const unsigned all = __ballot_sync(~0U, asks);
  if (all == 0) return;
  const unsigned in_warp = threadIdx.x % 32;
  std::uint32_t place = 0;
  if (in_warp == 0) place = atomicAdd(count, __popc(all));
  place = __shfl_sync(~0U, place, 0);
  if (asks) list[place + __popc(all & ((1U << in_warp) - 1U))] = item;
}

/// Cuts a run of very many entries into segments.
__device__ __forceinline__ void list_segments(const RunLists& lists, std::uint32_t run,
                                              std::uint32_t num_entries) {
  const std::uint32_t count = (num_entries + kSegment - 1) / kSegment;
  const std::uint32_t first = atomicAdd(lists.counts + kSegments, count);
  std::uint32_t* const cut = lists.cut + 3 * atomicAdd(lists.counts + kCut, 1U);
  cut[0] = run;
  cut[1] = first;
  cut[2] = count;
  for (std::uint32_t i = 0; i < count; ++i) {
    lists.segments[2 * (first + i)] = run;
    lists.segments[2 * (first + i) + 1] = i;
  }
}

/// Where a run lies among the sorted entries, and its first entry. Empty: no run.
struct Place {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  std::uint32_t key = ~0U;
  std::uint32_t value = 0;

  __device__ __forceinline__ void read_entry(const SortedRows& sorted) {
    if (begin == end) return;
    key = sorted.keys[begin];
    value = sorted.values[begin];
  }
};

template <bool kSeveral>
__device__ __forceinline__ Place place_of_item(const SortedRows& sorted, const std::uint32_t* list,
                                               std::uint32_t item, std::uint32_t num_items,
                                               std::uint32_t num_runs) {
  Place place;
  if (item >= num_items) return place;
  const std::uint32_t run = kSeveral ? list[1 + item] : item;
  place.begin = sorted.run_starts[run];
  place.end = run + 1 < num_runs ? sorted.run_starts[run + 1] : *sorted.count;
  return place;
}

/// First keys of the tables, and whether they are for this kernel, in shared memory if they fit.
struct Keys {
  std::uint32_t first[kSharedTables];
  bool is_mine[kSharedTables];
};

/// Steps the runs of one entry each and lists the others; or, with kSeveral, steps the short ones
/// of several, which are in `several`. several[0] is their number.
template <Element kElement, int kCount, int kPacks, bool kPlain, bool kSeveral>
__global__ void __launch_bounds__(kThreads, kResident<kElement, kPlain, kSeveral>)
    light_kernel(TableCall call, SortedRows sorted, const TableSteps* tables, int num_tables,
                 bool takes_all, const float* gradient, float limit, std::uint32_t* several,
                 RunLists lists) {
  constexpr int kRuns = (kPlain ? 4 : 2) / kPacks;
  __shared__ Keys keys;
  __shared__ std::conditional_t<kSeveral, SeveralRuns, Runs> all_runs[kWarps];
  const std::uint32_t num_runs = *sorted.num_runs;
  const std::uint32_t num_items = kSeveral ? several[0] : num_runs;
  if (blockIdx.x * kThreads >= num_items) return;
  const bool is_shared = num_tables <= kSharedTables;
  if (is_shared) {
    for (int i = static_cast<int>(threadIdx.x); i < num_tables; i += kThreads) {
      keys.first[i] = tables[i].first_key;
      keys.is_mine[i] = is_for<kElement, kCount, kPacks, kPlain>(tables[i], takes_all);
    }
  }
  __syncthreads();
  auto& runs = all_runs[threadIdx.x / 32];
  const int in_warp = static_cast<int>(threadIdx.x % 32);
  const unsigned below = (1U << in_warp) - 1U;
  const std::uint32_t stride = gridDim.x * kThreads;
  std::uint32_t item = blockIdx.x * kThreads + threadIdx.x;
  // Where the lane's run lies is read while the runs before it are stepped.
  Place ahead = place_of_item<kSeveral>(sorted, several, item, num_items, num_runs);
  ahead.read_entry(sorted);
  for (; item - in_warp < num_items; item += stride) {
    int num_here = 0;
    {
      const Place own = ahead;
      ahead = place_of_item<kSeveral>(sorted, several, item + stride, num_items, num_runs);
      std::uint32_t count = 0;  // 0: not for this kernel
      std::uint32_t row = 0;
      int owner = 0;
      if (own.begin < own.end) {
        owner = is_shared ? table_of_key(keys.first, num_tables, own.key)
                          : table_of_steps(tables, num_tables, own.key);
        const bool is_mine =
            is_shared ? keys.is_mine[owner]
                      : is_for<kElement, kCount, kPacks, kPlain>(tables[owner], takes_all);
        if (own.key != ~0U && is_mine) {
          row = own.key - tables[owner].first_key;
          count = own.end - own.begin;
        }
      }
      if constexpr (!kSeveral) {
        if (count > kSegment) list_segments(lists, item, count);
        list_items(count > kShortRun && count <= kSegment, item, lists.counts + kMedium,
                   lists.medium);
        list_items(count > 1 && count <= kShortRun, item, several, several + 1);
        if (count != 1) count = 0;
      }
      const unsigned valid = __ballot_sync(~0U, count > 0);
      num_here = __popc(valid);
      if (count > 0) {
        const TableSteps& table = tables[owner];
        const int place = __popc(valid & below);
        const bool has_state = table.step.rule == RowRule::kRowWiseAdagrad;
        const float state = has_state ? table.state.momentum1[row] : 0.0F;
        const Source source = source_at(call, sorted, gradient, own.value);
        if constexpr (kSeveral) {
          std::uint32_t values[kShortRun];
#pragma unroll
          for (std::uint32_t j = 1; j < kShortRun; ++j) {
            values[j] = j < count ? sorted.values[own.begin + j] : 0;
          }
#pragma unroll
          for (std::uint32_t j = 1; j < kShortRun; ++j) {
            if (j < count) {
              runs.further[j - 1][place] = source_at(call, sorted, gradient, values[j]);
            }
          }
          runs.count[place] = count;
        }
        runs.first[place] = {source.data, row, source.factor};
        runs.owner[place] = owner;
        runs.state[place] = state;
      }
      ahead.read_entry(sorted);
      __syncwarp();
    }
    // Runs of one table are stepped together; rarely do 32 of them belong to two.
    for (int begin = 0; begin < num_here;) {
      const int owner = runs.owner[begin];
      const unsigned others =
          __ballot_sync(~0U, in_warp > begin && in_warp < num_here && runs.owner[in_warp] != owner);
      const int end = others == 0 ? num_here : __ffs(static_cast<int>(others)) - 1;
      step_runs<kElement, kCount, kPacks, kRuns, kPlain>(tables[owner], limit, runs, begin, end);
      begin = end;
    }
    __syncwarp();
  }
}

}  // namespace

int step_light_rows(const TableCall& call, const SortedRows& sorted, const TableSteps* tables,
                    const TableSteps* host_tables, int num_tables, const float* gradient,
                    float limit, const RunLists& lists, cudaStream_t stream) {
  const bool is_plain_call =
      has_packed_gradients(call, gradient) && limit == std::numeric_limits<float>::infinity();
  const std::int64_t needed = (sorted.num_entries + kThreads - 1) / kThreads;
  // Blocks stay and take run after run: what they read of the tables they read once. Many rounds of
  // them, so that those at work at the same time are at rows and gradients near each other.
  const std::int64_t rounds = sorted.is_picked ? 8 : 64;
  const auto blocks = [&](int resident) {
    return static_cast<int>(std::min(needed, num_multiprocessors() * resident * rounds));
  };
  int error = 0;
  const auto start = [&]<Element kElement, int kCount, int kPacks, bool kPlain>() {
    if (kPlain && !is_plain_call) return;
    const bool takes_all = !kPlain && (!is_plain_call || kCount == 1);
    if (std::none_of(host_tables, host_tables + num_tables, [&](const TableSteps& table) {
          return is_for<kElement, kCount, kPacks, kPlain>(table, takes_all);
        })) {
      return;
    }
    if (error == 0) error = cudaMemsetAsync(sorted.spare, 0, 4, stream);
    const int num_single = blocks(kResident<kElement, kPlain, false>);
    light_kernel<kElement, kCount, kPacks, kPlain, false><<<num_single, kThreads, 0, stream>>>(
        call, sorted, tables, num_tables, takes_all, gradient, limit, sorted.spare, lists);
    const int num_several = blocks(kResident<kElement, kPlain, true>);
    light_kernel<kElement, kCount, kPacks, kPlain, true><<<num_several, kThreads, 0, stream>>>(
        call, sorted, tables, num_tables, takes_all, gradient, limit, sorted.spare, lists);
  };
  const auto start_all = [&]<Element kElement>() {
    start.template operator()<kElement, 4, 1, true>();
    start.template operator()<kElement, 4, 2, true>();
    start.template operator()<kElement, 4, 1, false>();
    start.template operator()<kElement, 4, 2, false>();
    start.template operator()<kElement, 1, 1, false>();
  };
  start_all.template operator()<Element::kFloat32>();
  start_all.template operator()<Element::kFloat16>();
  start_all.template operator()<Element::kBFloat16>();
  return error != 0 ? error : cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
