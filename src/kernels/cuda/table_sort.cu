// Sorts the rows that a call looks up on CUDA and finds where each one's entries begin.

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>

#include <algorithm>
#include <bit>

#include "kernels/cuda/table_marks.cuh"
#include "kernels/cuda/work_layout.h"

namespace tessera::kernels::cuda {

using DefaultDigits = cub::detail::radix::policy_hub<std::uint32_t, std::uint32_t, int>;

/// Digits of 9 bits: keys of up to 27 bits are sorted in three passes instead of four.
struct WideDigits {
  static constexpr int kBits = 9;
  struct Policy900 : cub::ChainedPolicy<900, Policy900, DefaultDigits::Policy800> {
    using Default = DefaultDigits::Policy900;
    static constexpr bool ONESWEEP = true;
    static constexpr int ONESWEEP_RADIX_BITS = kBits;
    using HistogramPolicy = cub::AgentRadixSortHistogramPolicy<128, 16, 1, std::uint32_t, kBits>;
    using ExclusiveSumPolicy = cub::AgentRadixSortExclusiveSumPolicy<256, kBits>;
    using OnesweepPolicy = cub::AgentRadixSortOnesweepPolicy<
        512, 16, std::uint32_t, 1, cub::RADIX_RANK_MATCH_EARLY_COUNTS_ANY,
        cub::BLOCK_SCAN_RAKING_MEMOIZE, cub::RADIX_SORT_STORE_DIRECT, kBits>;
    using ScanPolicy = Default::ScanPolicy;
    using DownsweepPolicy = Default::DownsweepPolicy;
    using AltDownsweepPolicy = Default::AltDownsweepPolicy;
    using UpsweepPolicy = Default::UpsweepPolicy;
    using AltUpsweepPolicy = Default::AltUpsweepPolicy;
    using SingleTilePolicy = Default::SingleTilePolicy;
    using SegmentedPolicy = Default::SegmentedPolicy;
    using AltSegmentedPolicy = Default::AltSegmentedPolicy;
  };
  using MaxPolicy = Policy900;
};

namespace {

constexpr int kThreads = 256;

constexpr int kBagsPerWarp = 8;
/// Places of a call that are filled at the same time.
constexpr int kApart = 64;

/// A warp takes the positions of a few bags that follow each other, so that its lanes are busy even
/// if bags are short. Positions and rows fit in 32 bits, as the keys do.
__global__ void __launch_bounds__(kThreads)
    fill_kernel(TableCall call, const std::int32_t* table_of, const std::uint32_t* first_keys,
                bool keep_bags, std::uint32_t* keys, std::uint32_t* values, std::uint32_t* bag_of,
                RowMarks marks, const TableSteps* tables) {
  // Blocks at work at the same time are at different places: marks of one hot row would wait for
  // each other.
  const std::int64_t block =
      static_cast<std::int64_t>(blockIdx.x) % kApart * ((gridDim.x + kApart - 1) / kApart) +
      blockIdx.x / kApart;
  const std::int64_t first_bag = (block * (kThreads / 32) + threadIdx.x / 32) * kBagsPerWarp;
  if (first_bag >= call.num_bags) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Lane i knows bag i: where it begins, and its table. Bags past the last one are empty.
  const std::int64_t own_bag = min(first_bag + min(lane, kBagsPerWarp), call.num_bags);
  const auto own_begin = static_cast<std::uint32_t>(call.ids.offset(own_bag));
  const int f = feature_of_bag(call, min(own_bag, call.num_bags - 1));
  const auto own_rows = static_cast<std::uint32_t>(call.features[f].rows.num_rows);
  const std::uint32_t own_key = first_keys[table_of[f]];
  const bool is_marked = marks.seen != nullptr;
  // 0: not stepped, 1: stepped, 2: rows that occur once are stepped apart
  int own_kind = 1;
  if (is_marked) {
    const TableSteps& table = tables[table_of[f]];
    own_kind = table.rows.num_rows == 0 ? 0 : (is_once(table) ? 2 : 1);
  }
  std::uint32_t begins[kBagsPerWarp + 1];
#pragma unroll
  for (int i = 0; i <= kBagsPerWarp; ++i) begins[i] = __shfl_sync(~0U, own_begin, i);
  for (std::uint32_t base = begins[0]; base < begins[kBagsPerWarp]; base += 32) {
    const std::uint32_t k = base + lane;
    int i = 0;
#pragma unroll
    for (int j = 1; j < kBagsPerWarp; ++j) i += k >= begins[j] ? 1 : 0;
    const std::uint32_t num_rows = __shfl_sync(~0U, own_rows, i);
    const std::uint32_t first_key = __shfl_sync(~0U, own_key, i);
    const int kind = __shfl_sync(~0U, own_kind, i);
    if (k >= begins[kBagsPerWarp]) continue;
    const auto bag = static_cast<std::uint32_t>(first_bag + i);
    auto id = static_cast<std::uint64_t>(call.ids.id(k));
    if (id >= num_rows) id = 0;
    // Without rows there is nothing to step: such a key is that of no table's row.
    const std::uint32_t key =
        num_rows == 0 || kind == 0 ? ~0U : first_key + static_cast<std::uint32_t>(id);
    keys[k] = key;
    if (is_marked && key != ~0U) marks.mark(key, kind == 1);
    values[k] = keep_bags || call.is_sequence ? k : bag;
    if (keep_bags) bag_of[k] = bag;
  }
}

__global__ void set_kernel(std::uint32_t* to, std::uint32_t value) { *to = value; }

struct Pairs {
  std::uint32_t* keys = nullptr;
  std::uint32_t* values = nullptr;
};

template <typename Digits>
int sort_with(void* work, std::size_t& bytes, const Pairs& from, const Pairs& to, int count,
              int bits, cudaStream_t stream) {
  cub::DoubleBuffer<std::uint32_t> keys(from.keys, to.keys);
  cub::DoubleBuffer<std::uint32_t> values(from.values, to.values);
  // `from` stays as it is, so that the result is in `to` after any number of passes.
  return cub::DispatchRadixSort<cub::SortOrder::Ascending, std::uint32_t, std::uint32_t, int,
                                cub::detail::identity_decomposer_t,
                                Digits>::Dispatch(work, bytes, keys, values, count, 0, bits,
                                                  /*is_overwrite_okay=*/false, stream);
}

int sort_pairs(void* work, std::size_t& bytes, const Pairs& from, const Pairs& to, int count,
               int bits, cudaStream_t stream) {
  // Wide digits take longer for each pass.
  return bits > 24 && bits <= 3 * WideDigits::kBits
             ? sort_with<WideDigits>(work, bytes, from, to, count, bits, stream)
             : sort_with<DefaultDigits>(work, bytes, from, to, count, bits, stream);
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
    for (const int bits : {3 * WideDigits::kBits, 32}) {
      std::size_t size = 0;
      sort_pairs(nullptr, size, {}, {}, n, bits, nullptr);
      sort_bytes = std::max(sort_bytes, size);
    }
    cub::DeviceSelect::Flagged(nullptr, select_bytes, thrust::counting_iterator<std::uint32_t>(0),
                               thrust::make_transform_iterator(
                                   thrust::counting_iterator<std::uint32_t>(0), IsStart{nullptr}),
                               static_cast<std::uint32_t*>(nullptr),
                               static_cast<std::uint32_t*>(nullptr), n);
    WorkLayout work;
    const auto each = static_cast<std::size_t>(count_of_positions);
    for (std::size_t* array : {&keys, &values, &sorted_keys, &sorted_values, &bag_of, &starts}) {
      *array = work.take_numbers(each);
    }
    count = work.take(8);
    temporary = work.take(std::max(sort_bytes, select_bytes));
    bytes = work.bytes();
  }
};

}  // namespace

int fill_keys(const TableCall& call, const std::int32_t* table_of, const std::uint32_t* first_keys,
              bool keep_bags, std::uint32_t* keys, std::uint32_t* values, std::uint32_t* bag_of,
              const RowMarks& marks, const TableSteps* tables, cudaStream_t stream) {
  const std::int64_t blocks = call.num_bags / (kThreads / 32 * kBagsPerWarp) + 1;
  const auto grid = static_cast<unsigned>((blocks + kApart - 1) / kApart * kApart);
  fill_kernel<<<grid, kThreads, 0, stream>>>(call, table_of, first_keys, keep_bags, keys, values,
                                             bag_of, marks, tables);
  return cudaGetLastError();
}

std::size_t sort_bytes(std::int64_t num_positions) {
  return SortMemory(std::max<std::int64_t>(num_positions, 1)).bytes;
}

int sort_rows(const TableCall& call, const std::int32_t* table_of, const std::uint32_t* first_keys,
              std::int64_t num_keys, bool keep_bags, void* work, SortedRows* sorted, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  const SortMemory memory(std::max<std::int64_t>(call.num_positions, 1));
  char* const base = static_cast<char*>(work);
  const auto array = arrays_in(work);
  const auto n = static_cast<int>(call.num_positions);
  if (const int error = fill_keys(call, table_of, first_keys, keep_bags, array(memory.keys),
                                  array(memory.values), array(memory.bag_of), {}, nullptr, queue);
      error != 0) {
    return error;
  }
  set_kernel<<<1, 1, 0, queue>>>(array(memory.count) + 1, static_cast<std::uint32_t>(n));
  std::size_t bytes = memory.sort_bytes;
  // One bit more than the keys have, for the key of no row.
  const int bits =
      std::min(32, static_cast<int>(std::bit_width(static_cast<std::uint64_t>(num_keys))) + 1);
  if (const int error =
          sort_pairs(base + memory.temporary, bytes, {array(memory.keys), array(memory.values)},
                     {array(memory.sorted_keys), array(memory.sorted_values)}, n, bits, queue);
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
  sorted->count = array(memory.count) + 1;
  sorted->spare = array(memory.keys);
  sorted->bag_of = keep_bags ? array(memory.bag_of) : nullptr;
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
