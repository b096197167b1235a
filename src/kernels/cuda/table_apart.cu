// Steps the rows of a call without sorting all of them. Rows that occur once need no sort: they are
// stepped bag by bag (table_once.cu). The others are picked out, in order, sorted and stepped as in
// a call that sorts everything, at the same time on a second stream. How many they are is known on
// the device alone, and the host does not wait for it: the sort below takes its count from there.

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <cub/agent/agent_radix_sort_histogram.cuh>
#include <cub/agent/agent_radix_sort_onesweep.cuh>
#include <cub/device/device_select.cuh>

#include <algorithm>
#include <bit>

#include "kernels/cuda/table_marks.cuh"
#include "kernels/cuda/work_layout.h"

namespace tessera::kernels::cuda {
namespace {

namespace radix = cub::detail::radix_sort;

/// CUB's sort in parts that take the number of items from the device.
template <int kBits>
struct CountedSort {
  static constexpr int kDigits = 1 << kBits;
  using HistogramPolicy = cub::AgentRadixSortHistogramPolicy<128, 16, 1, std::uint32_t, kBits>;
  using PassPolicy = cub::AgentRadixSortOnesweepPolicy<
      512, 16, std::uint32_t, 1, cub::RADIX_RANK_MATCH_EARLY_COUNTS_ANY,
      cub::BLOCK_SCAN_RAKING_MEMOIZE, cub::RADIX_SORT_STORE_DIRECT, kBits>;
  using Histogram = radix::AgentRadixSortHistogram<HistogramPolicy, false, std::uint32_t, int,
                                                   cub::detail::identity_decomposer_t>;
  using Pass = radix::AgentRadixSortOnesweep<PassPolicy, false, std::uint32_t, std::uint32_t, int,
                                             int, cub::detail::identity_decomposer_t>;
  static constexpr int kTile = PassPolicy::BLOCK_THREADS * PassPolicy::ITEMS_PER_THREAD;

  static constexpr int passes(int bits) { return (bits + kBits - 1) / kBits; }
  static std::size_t num_tiles(std::int64_t most) { return (most + kTile - 1) / kTile; }
  /// Numbers of work memory: bins, places of tiles and a counter for every pass.
  static std::size_t num_work(std::int64_t most, int bits) {
    return passes(bits) * (kDigits + num_tiles(most) * kDigits + 1);
  }
};

template <int kBits>
__global__ void __launch_bounds__(CountedSort<kBits>::HistogramPolicy::BLOCK_THREADS)
    histogram_kernel(int* bins, const std::uint32_t* keys, const std::uint32_t* count, int bits) {
  using Agent = typename CountedSort<kBits>::Histogram;
  __shared__ typename Agent::TempStorage storage;
  Agent agent(storage, bins, keys, static_cast<int>(*count), 0, bits);
  agent.Process();
}

/// Numbers of every digit to where they begin; one block per pass.
template <int kBits>
__global__ void __launch_bounds__(1 << kBits) begin_kernel(int* bins) {
  using Scan = cub::BlockScan<int, 1 << kBits>;
  __shared__ typename Scan::TempStorage storage;
  int& own = bins[(blockIdx.x << kBits) + threadIdx.x];
  int begin = own;
  Scan(storage).ExclusiveSum(begin, begin);
  own = begin;
}

struct Pairs {
  std::uint32_t* keys = nullptr;
  std::uint32_t* values = nullptr;
};

template <int kBits>
__global__ void __launch_bounds__(CountedSort<kBits>::PassPolicy::BLOCK_THREADS)
    pass_kernel(int* lookback, int* counter, const int* bins, Pairs to, Pairs from,
                const std::uint32_t* count, int bit, int bits) {
  using Agent = typename CountedSort<kBits>::Pass;
  __shared__ typename Agent::TempStorage storage;
  const auto items = static_cast<int>(*count);
  if (static_cast<std::int64_t>(blockIdx.x) * CountedSort<kBits>::kTile >= items) return;
  Agent agent(storage, lookback, counter, nullptr, bins, to.keys, from.keys, to.values, from.values,
              items, bit, bits);
  agent.Process();
}

/// Sorts `*count` of at most `most` pairs; returns in which of the two they are.
template <int kBits>
Pairs sort_counted(Pairs from, Pairs other, const std::uint32_t* count, std::int64_t most, int bits,
                   std::uint32_t* work, cudaStream_t stream) {
  using Sort = CountedSort<kBits>;
  const int num_passes = Sort::passes(bits);
  const std::size_t tiles = Sort::num_tiles(most);
  int* const bins = reinterpret_cast<int*>(work);
  int* const counters = bins + num_passes * Sort::kDigits;
  int* const lookback = counters + num_passes;
  cudaMemsetAsync(work, 0, 4 * Sort::num_work(most, bits), stream);
  const auto blocks = static_cast<unsigned>(std::min<std::size_t>(
      (most + 2047) / 2048, static_cast<std::size_t>(num_multiprocessors()) * 8));
  histogram_kernel<kBits>
      <<<blocks, Sort::HistogramPolicy::BLOCK_THREADS, 0, stream>>>(bins, from.keys, count, bits);
  begin_kernel<kBits><<<num_passes, 1 << kBits, 0, stream>>>(bins);
  for (int pass = 0; pass < num_passes; ++pass) {
    pass_kernel<kBits>
        <<<static_cast<unsigned>(tiles), Sort::PassPolicy::BLOCK_THREADS, 0, stream>>>(
            lookback + pass * tiles * Sort::kDigits, counters + pass, bins + pass * Sort::kDigits,
            other, from, count, pass * kBits, std::min(kBits, bits - pass * kBits));
    std::swap(from, other);
  }
  return from;
}

constexpr int kNarrow = 8;
constexpr int kWideDigit = 9;
bool is_wide(int bits) { return bits > 3 * kNarrow && bits <= 3 * kWideDigit; }

/// One byte per position: whether it is sorted.
__global__ void __launch_bounds__(256)
    flag_kernel(RowMarks marks, const std::uint32_t* keys, std::uint32_t count, bool* flags) {
  const std::uint32_t i = blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  const std::uint32_t key = keys[i];
  flags[i] = key != ~0U && marks.is_again(key);
}

/// Fetches the pairs at the chosen places.
__global__ void __launch_bounds__(256)
    fetch_kernel(Pairs from, const std::uint32_t* places, const std::uint32_t* count, Pairs to) {
  const std::uint32_t end = *count;
  for (std::uint32_t i = blockIdx.x * 256 + threadIdx.x; i < end; i += gridDim.x * 256) {
    const std::uint32_t place = places[i];
    to.keys[i] = from.keys[place];
    to.values[i] = from.values[place];
  }
}

struct IsCountedStart {
  const std::uint32_t* keys;
  const std::uint32_t* count;
  __host__ __device__ bool operator()(std::uint32_t i) const {
    return i < *count && (i == 0 || keys[i] != keys[i - 1]);
  }
};

auto starts_of(const IsCountedStart& is_start) {
  return thrust::make_transform_iterator(thrust::counting_iterator<std::uint32_t>(0), is_start);
}

/// How many bits tell the keys, and where their marks are.
struct Marking {
  std::int64_t num_words;
  int shift = 0;

  Marking(std::int64_t num_positions, std::int64_t num_keys) {
    constexpr std::int64_t kPerPosition = 32;
    std::int64_t num_bits = num_keys;
    if (num_keys > std::max<std::int64_t>(kPerPosition * num_positions, 1 << 20)) {
      num_bits = std::int64_t{1} << 20;
      while (num_bits < kPerPosition * num_positions && num_bits < std::int64_t{1} << 31) {
        num_bits *= 2;
      }
      shift = 32 - (std::bit_width(static_cast<std::uint64_t>(num_bits)) - 1);
    }
    num_words = num_bits / 32 + 1;
  }
};

/// How the work memory is cut.
struct ApartMemory {
  std::size_t keys, values, bag_of, chosen_keys, chosen_values, other_keys, other_values, starts,
      counts, marks, sort, select, steps, bytes;
  std::size_t select_bytes = 0;
  int bits;
  Marking marking;

  ApartMemory(std::int64_t positions, std::int64_t num_keys, std::int64_t max_columns)
      : bits(std::bit_width(static_cast<std::uint64_t>(num_keys))), marking(positions, num_keys) {
    const auto n = static_cast<int>(positions);
    std::size_t size = 0;
    cub::DeviceSelect::Flagged(nullptr, size, thrust::counting_iterator<std::uint32_t>(0),
                               static_cast<const bool*>(nullptr),
                               static_cast<std::uint32_t*>(nullptr),
                               static_cast<std::uint32_t*>(nullptr), n);
    select_bytes = size;
    cub::DeviceSelect::Flagged(nullptr, size, thrust::counting_iterator<std::uint32_t>(0),
                               starts_of({}), static_cast<std::uint32_t*>(nullptr),
                               static_cast<std::uint32_t*>(nullptr), n);
    select_bytes = std::max(select_bytes, size);
    WorkLayout work;
    const auto each = static_cast<std::size_t>(positions);
    for (std::size_t* array : {&keys, &values, &bag_of, &chosen_keys, &chosen_values, &other_keys,
                               &other_values, &starts}) {
      *array = work.take_numbers(each);
    }
    counts = work.take(8);
    marks = work.take(static_cast<std::size_t>(marking.num_words) * 8);
    sort = work.take_numbers(is_wide(bits) ? CountedSort<kWideDigit>::num_work(positions, bits)
                                           : CountedSort<kNarrow>::num_work(positions, bits));
    select = work.take(select_bytes);
    steps = work.take(step_bytes(positions, max_columns));
    bytes = work.bytes();
  }
};

/// A stream beside the caller's, whose work goes first, and how the two wait for each other. They
/// live as long as the process: one for each thread and device.
struct Beside {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;

  static Beside* of_device() {
    constexpr int kDevices = 64;
    static thread_local Beside all[kDevices];
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return nullptr;
    Beside& own = all[device];
    if (own.stream != nullptr) return &own;
    int least = 0;
    int greatest = 0;
    cudaDeviceGetStreamPriorityRange(&least, &greatest);
    const auto make = [](cudaEvent_t* event) {
      return cudaEventCreateWithFlags(event, cudaEventDisableTiming) == cudaSuccess;
    };
    if (!make(&own.begin) || !make(&own.end) ||
        cudaStreamCreateWithPriority(&own.stream, cudaStreamNonBlocking, greatest) != cudaSuccess) {
      return nullptr;
    }
    return &own;
  }
};

}  // namespace

bool steps_apart(const TableCall& call, const TableSteps* host_tables, int num_tables) {
  constexpr std::int64_t kIdsPerBag = 3;
  if (call.is_sequence || call.num_positions < kIdsPerBag * call.num_bags ||
      call.num_positions >= std::int64_t{1} << 28) {
    return false;
  }
  const auto is_stepped = [](const TableSteps& table) {
    return table.rows.num_rows == 0 || table.target == RowTarget::kStep;
  };
  return std::all_of(host_tables, host_tables + num_tables, is_stepped) &&
         std::any_of(host_tables, host_tables + num_tables, is_once);
}

std::size_t apart_bytes(std::int64_t num_positions, std::int64_t num_keys,
                        std::int64_t max_columns) {
  return ApartMemory(num_positions, num_keys, max_columns).bytes;
}

int step_rows_apart(const TableCall& call, const std::int32_t* table_of,
                    const std::uint32_t* first_keys, std::int64_t num_keys, bool keep_bags,
                    const TableSteps* tables, const TableSteps* host_tables, int num_tables,
                    const float* gradient, float limit, void* work, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  std::int64_t max_columns = 0;
  for (int i = 0; i < num_tables; ++i) {
    max_columns = std::max(max_columns, host_tables[i].rows.num_columns);
  }
  const ApartMemory memory(call.num_positions, num_keys, max_columns);
  char* const base = static_cast<char*>(work);
  const auto array = arrays_in(work);
  RowMarks marks;
  marks.seen = array(memory.marks);
  marks.again = marks.seen + memory.marking.num_words;
  marks.shift = memory.marking.shift;
  int error = cudaMemsetAsync(marks.seen, 0, 8 * memory.marking.num_words, queue);
  if (error == 0) {
    error = fill_keys(call, table_of, first_keys, keep_bags, array(memory.keys),
                      array(memory.values), array(memory.bag_of), marks, tables, queue);
  }
  Beside* const beside = Beside::of_device();
  auto* const side = beside != nullptr ? beside->stream : queue;
  if (error == 0 && beside != nullptr) {
    error = cudaEventRecord(beside->begin, queue);
    if (error == 0) error = cudaStreamWaitEvent(side, beside->begin, 0);
  }
  if (error != 0) return error;
  const auto n = static_cast<int>(call.num_positions);
  Pairs chosen{array(memory.chosen_keys), array(memory.chosen_values)};
  std::uint32_t* const count = array(memory.counts);
  std::size_t bytes = memory.select_bytes;
  const Pairs all{array(memory.keys), array(memory.values)};
  // Where a row begins is written only after the places have been read, and pairs to sort into only
  // after the flags.
  std::uint32_t* const places = array(memory.starts);
  bool* const flags = reinterpret_cast<bool*>(base + memory.other_keys);
  flag_kernel<<<static_cast<unsigned>((call.num_positions + 255) / 256), 256, 0, side>>>(
      marks, all.keys, static_cast<std::uint32_t>(n), flags);
  error = cub::DeviceSelect::Flagged(base + memory.select, bytes,
                                     thrust::counting_iterator<std::uint32_t>(0), flags, places,
                                     count, n, side);
  if (error != 0) return error;
  const auto blocks = static_cast<unsigned>(
      std::min<std::int64_t>((call.num_positions + 255) / 256, num_multiprocessors() * 8));
  fetch_kernel<<<blocks, 256, 0, side>>>(all, places, count, chosen);
  const Pairs other{array(memory.other_keys), array(memory.other_values)};
  const Pairs in_order =
      is_wide(memory.bits)
          ? sort_counted<kWideDigit>(chosen, other, count, n, memory.bits, array(memory.sort), side)
          : sort_counted<kNarrow>(chosen, other, count, n, memory.bits, array(memory.sort), side);
  bytes = memory.select_bytes;
  error = cub::DeviceSelect::Flagged(
      base + memory.select, bytes, thrust::counting_iterator<std::uint32_t>(0),
      starts_of({in_order.keys, count}), array(memory.starts), count + 1, n, side);
  if (error != 0) return error;
  SortedRows sorted;
  sorted.keys = in_order.keys;
  sorted.values = in_order.values;
  sorted.run_starts = array(memory.starts);
  sorted.num_runs = count + 1;
  sorted.num_entries = call.num_positions;
  sorted.count = count;
  sorted.is_picked = true;
  sorted.bag_of = keep_bags ? array(memory.bag_of) : nullptr;
  // What is not the result any more.
  sorted.spare = in_order.keys == chosen.keys ? other.keys : chosen.keys;
  error = step_sorted_rows(call, sorted, tables, host_tables, num_tables, gradient, limit,
                           base + memory.steps, side);
  if (error == 0) {
    error = step_once_rows(call, table_of, array(memory.keys), marks, tables, host_tables,
                           num_tables, gradient, limit, queue);
  }
  if (error == 0 && beside != nullptr) {
    error = cudaEventRecord(beside->end, side);
    if (error == 0) error = cudaStreamWaitEvent(queue, beside->end, 0);
  }
  return error != 0 ? error : cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
