// A cache of rows in device memory. Everything is decided on the device: which rows are missing is
// a bitmap over all keys, so that they come out in order without a sort; which slots are given away
// is a sort of all slots, in which slots of equal rank stay in order. The same calls thus fill the
// cache in the same way every time.

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include <algorithm>
#include <bit>

#include "kernels/cuda/row_cache_launch.h"
#include "kernels/cuda/table_marks.cuh"
#include "kernels/cuda/work_layout.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRankBits = 20;
constexpr std::uint32_t kHeld = (1U << kRankBits) - 1U;  // not given away

std::uint32_t words_of(std::int64_t num_keys) {
  return static_cast<std::uint32_t>(num_keys / 32 + 1);  // the last has a bit to spare
}

struct BitCount {
  const std::uint32_t* words;
  __host__ __device__ std::uint32_t operator()(std::uint32_t i) const {
#if defined(__CUDA_ARCH__)
    return static_cast<std::uint32_t>(__popc(words[i]));
#else
    return static_cast<std::uint32_t>(std::popcount(words[i]));
#endif
  }
};

auto counts_of(const std::uint32_t* words) {
  return thrust::make_transform_iterator(thrust::counting_iterator<std::uint32_t>(0),
                                         BitCount{words});
}

/// The last table whose first key, or slot, is not behind `number`.
template <std::uint32_t CachedTable::* kFirst>
__device__ __forceinline__ int table_with(const RowCacheArrays& cache, std::uint32_t number) {
  int low = 0;
  int high = cache.num_tables - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (cache.tables[middle].*kFirst <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Marks what is there as used, and what is missing in the bitmap.
__global__ void __launch_bounds__(kThreads)
    find_kernel(RowCacheArrays cache, const std::uint32_t* keys, std::uint32_t num_positions,
                std::uint32_t number, std::uint32_t* missing) {
  const std::uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= num_positions) return;
  const std::uint32_t key = keys[i];
  if (key == RowCacheArrays::kNoKey) return;
  const std::int32_t slot = cache.slot_of[key];
  if (slot < 0) {
    std::uint32_t* const word = missing + key / 32;
    const std::uint32_t bit = 1U << (key % 32);
    if ((__ldcg(word) & bit) == 0) atomicOr(word, bit);
    return;
  }
  const std::uint32_t place =
      cache.tables[table_with<&CachedTable::first_key>(cache, key)].first_slot +
      static_cast<std::uint32_t>(slot);
  // One of the positions of a row counts.
  if (__ldcg(cache.used + place) != number && atomicExch(cache.used + place, number) != number) {
    ++cache.num_used[place];
  }
}

__global__ void __launch_bounds__(kThreads)
    list_kernel(const std::uint32_t* words, const std::uint32_t* begins, std::uint32_t num_words,
                std::uint32_t* missing) {
  const std::uint32_t w = blockIdx.x * kThreads + threadIdx.x;
  if (w >= num_words) return;
  std::uint32_t at = begins[w];
  for (std::uint32_t bits = words[w]; bits != 0; bits &= bits - 1) {
    missing[at++] = w * 32 + static_cast<std::uint32_t>(__ffs(static_cast<int>(bits)) - 1);
  }
}

/// In which order slots are given away, and how many of each table are not.
__global__ void __launch_bounds__(kThreads)
    rank_kernel(RowCacheArrays cache, CacheCall how, std::uint32_t* ranks, std::uint32_t* places,
                std::uint32_t* report) {
  const std::uint32_t place = blockIdx.x * kThreads + threadIdx.x;
  if (place >= cache.num_slots) return;
  const int table = table_with<&CachedTable::first_slot>(cache, place);
  const bool is_empty = cache.key_of[place] == RowCacheArrays::kNoKey;
  const std::uint32_t used = cache.used[place];
  std::uint32_t rank = 0;
  const bool is_held = !is_empty && used >= how.oldest_live;
  // Lanes of one table count together: those of most warps are.
  const unsigned here = __activemask();
  const unsigned alike = __match_any_sync(here, table);
  const unsigned held = __ballot_sync(here, is_held) & alike;
  const unsigned found = __ballot_sync(here, is_held && used == how.number) & alike;
  if (held != 0 && __ffs(static_cast<int>(alike)) - 1 == static_cast<int>(threadIdx.x % 32)) {
    atomicAdd(report + kCacheReport * table + 1, static_cast<std::uint32_t>(__popc(held)));
    atomicAdd(report + kCacheReport * table + 2, static_cast<std::uint32_t>(__popc(found)));
  }
  if (is_held) {
    rank = kHeld;
  } else if (!is_empty && how.least_frequent) {
    rank = min(cache.num_used[place] + 1, kHeld - 1);
  } else if (!is_empty) {
    rank = kHeld - 1 - min(how.number - used, kHeld - 2);
  }
  ranks[place] = static_cast<std::uint32_t>(table) << kRankBits | rank;
  places[place] = place;
}

/// The number of missing keys of each table, and whether all of them can come. One block.
__global__ void __launch_bounds__(kThreads)
    judge_kernel(RowCacheArrays cache, const std::uint32_t* words, const std::uint32_t* begins,
                 std::uint32_t* firsts, std::uint32_t* report, std::uint32_t* is_refused) {
  const auto below = [&](std::uint32_t key) {
    return begins[key / 32] +
           static_cast<std::uint32_t>(__popc(words[key / 32] & ((1U << (key % 32)) - 1U)));
  };
  for (int t = static_cast<int>(threadIdx.x); t < cache.num_tables; t += kThreads) {
    const CachedTable& table = cache.tables[t];
    const std::uint32_t first = below(table.first_key);
    const std::uint32_t count = below(table.first_key + table.num_keys) - first;
    firsts[t] = first;
    if (t == cache.num_tables - 1) firsts[t + 1] = first + count;
    report[kCacheReport * t] = count;
    if (count > table.num_slots - report[kCacheReport * t + 1]) *is_refused = 1;
  }
}

template <typename Part>
__device__ __forceinline__ void copy_parts(const char* from, char* to, std::int64_t bytes,
                                           int lane) {
#pragma unroll 1  // most rows are one round of a warp
  for (std::int64_t i = lane; i < bytes / static_cast<std::int64_t>(sizeof(Part)); i += 32) {
    reinterpret_cast<Part*>(to)[i] = reinterpret_cast<const Part*>(from)[i];
  }
}

/// A row's piece, by a warp.
__device__ __forceinline__ void copy_row(const char* from, char* to, std::int64_t bytes, int lane) {
  const auto either = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
  const auto odd = (either | static_cast<std::uintptr_t>(bytes)) % 16;
  if (odd == 0) {
    copy_parts<uint4>(from, to, bytes, lane);
  } else if (odd % 4 == 0) {
    copy_parts<std::uint32_t>(from, to, bytes, lane);
  } else {
    copy_parts<std::uint16_t>(from, to, bytes, lane);
  }
}

__device__ __forceinline__ void send_home(const CachedTable& table, std::uint32_t slot,
                                          std::uint32_t row, int lane) {
#pragma unroll 1
  for (const CachedPiece& piece : table.pieces) {
    if (piece.bytes == 0) continue;
    copy_row(piece.cached + slot * piece.bytes, piece.home + row * piece.bytes, piece.bytes, lane);
  }
}

/// A warp moves a row.
__global__ void __launch_bounds__(kThreads)
    move_kernel(RowCacheArrays cache, std::uint32_t number, const std::uint32_t* missing,
                const std::uint32_t* firsts, const std::uint32_t* order,
                const std::uint32_t* is_refused) {
  if (*is_refused != 0) return;
  const std::uint32_t count = firsts[cache.num_tables];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t warps = gridDim.x * (kThreads / 32);
  for (std::uint32_t i = (blockIdx.x * kThreads + threadIdx.x) / 32; i < count; i += warps) {
    const std::uint32_t key = missing[i];
    const int t = table_with<&CachedTable::first_key>(cache, key);
    const CachedTable& table = cache.tables[t];
    const std::uint32_t place = order[table.first_slot + i - firsts[t]];
    const std::uint32_t slot = place - table.first_slot;
    const std::uint32_t leaving = cache.key_of[place];
    if (leaving != RowCacheArrays::kNoKey) {
      send_home(table, slot, leaving - table.first_key, lane);
    }
#pragma unroll 1
    for (const CachedPiece& piece : table.pieces) {
      if (piece.bytes == 0) continue;
      copy_row(piece.home + (key - table.first_key) * piece.bytes,
               piece.cached + slot * piece.bytes, piece.bytes, lane);
    }
    __syncwarp();  // all have read whose slot it was
    if (lane != 0) continue;
    if (leaving != RowCacheArrays::kNoKey) cache.slot_of[leaving] = -1;
    cache.slot_of[key] = static_cast<std::int32_t>(slot);
    cache.key_of[place] = key;
    cache.used[place] = number;
    cache.num_used[place] = 1;
  }
}

/// Ids to slots. Ids of tables that are not cached stay; one that does not fit 32 bits is outside.
__global__ void __launch_bounds__(kThreads)
    translate_kernel(RowCacheArrays cache, LookupIds ids, const std::uint32_t* keys,
                     std::uint32_t num_positions, std::int32_t* slots) {
  const std::uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= num_positions) return;
  const std::uint32_t key = keys[i];
  if (key != RowCacheArrays::kNoKey) {
    slots[i] = cache.slot_of[key];
    return;
  }
  const std::int64_t id = ids.id(i);
  slots[i] = id == static_cast<std::int32_t>(id) ? static_cast<std::int32_t>(id) : -1;
}

__global__ void __launch_bounds__(kThreads)
    write_back_kernel(RowCacheArrays cache, bool is_emptied) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t warps = gridDim.x * (kThreads / 32);
  for (std::uint32_t place = (blockIdx.x * kThreads + threadIdx.x) / 32; place < cache.num_slots;
       place += warps) {
    const std::uint32_t key = cache.key_of[place];
    if (key == RowCacheArrays::kNoKey) continue;
    const CachedTable& table = cache.tables[table_with<&CachedTable::first_slot>(cache, place)];
    send_home(table, place - table.first_slot, key - table.first_key, lane);
    __syncwarp();
    if (lane != 0 || !is_emptied) continue;
    cache.slot_of[key] = -1;
    cache.key_of[place] = RowCacheArrays::kNoKey;
  }
}

/// How the work memory is cut.
struct AdmitMemory {
  std::size_t keys, values, missing, words, begins, ranks, places, sorted_ranks, order, firsts,
      refused, temporary, bytes;
  std::size_t scan_bytes = 0;
  std::size_t sort_bytes = 0;

  AdmitMemory(std::int64_t positions, std::int64_t num_keys, std::int64_t num_slots) {
    const std::uint32_t num_words = words_of(num_keys);
    cub::DeviceScan::ExclusiveSum(nullptr, scan_bytes, counts_of(nullptr),
                                  static_cast<std::uint32_t*>(nullptr),
                                  static_cast<int>(num_words));
    cub::DeviceRadixSort::SortPairs(
        nullptr, sort_bytes, static_cast<const std::uint32_t*>(nullptr),
        static_cast<std::uint32_t*>(nullptr), static_cast<const std::uint32_t*>(nullptr),
        static_cast<std::uint32_t*>(nullptr), static_cast<int>(num_slots), 0, 32);
    WorkLayout work;
    keys = work.take_numbers(positions);
    values = work.take_numbers(positions);
    missing = work.take_numbers(std::min(positions, num_keys));
    words = work.take_numbers(num_words);
    begins = work.take_numbers(num_words);
    for (std::size_t* array : {&ranks, &places, &sorted_ranks, &order}) {
      *array = work.take_numbers(num_slots);
    }
    firsts = work.take_numbers(kMostCachedTables + 1);
    refused = work.take_numbers(1);
    temporary = work.take(std::max(scan_bytes, sort_bytes));
    bytes = work.bytes();
  }
};

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}
/// One block a multiprocessor: enough rows on their way for the bus, and room for what computes.
unsigned blocks_of_warps() { return static_cast<unsigned>(num_multiprocessors()); }

}  // namespace

std::size_t admit_bytes(std::int64_t num_positions, std::int64_t num_keys, std::int64_t num_slots) {
  return AdmitMemory(num_positions, num_keys, num_slots).bytes;
}

int find_rows(const TableCall& call, const std::int32_t* table_of, const std::uint32_t* first_keys,
              const RowCacheArrays& cache, const CacheCall& how, std::uint32_t* report, void* work,
              void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  const AdmitMemory memory(call.num_positions, cache.num_keys, cache.num_slots);
  const auto array = arrays_in(work);
  const auto n = static_cast<std::uint32_t>(call.num_positions);
  const std::uint32_t num_words = words_of(cache.num_keys);
  int error = cudaMemsetAsync(array(memory.words), 0, 4UL * num_words, queue);
  if (error == 0) error = cudaMemsetAsync(array(memory.refused), 0, 4, queue);
  if (error == 0) error = cudaMemsetAsync(report, 0, 4UL * kCacheReport * cache.num_tables, queue);
  if (error == 0) {
    error = fill_keys(call, table_of, first_keys, false, array(memory.keys), array(memory.values),
                      nullptr, {}, nullptr, queue);
  }
  if (error != 0) return error;
  find_kernel<<<blocks_for(n), kThreads, 0, queue>>>(cache, array(memory.keys), n, how.number,
                                                     array(memory.words));
  std::size_t bytes = memory.scan_bytes;
  error =
      cub::DeviceScan::ExclusiveSum(array(memory.temporary), bytes, counts_of(array(memory.words)),
                                    array(memory.begins), static_cast<int>(num_words), queue);
  if (error != 0) return error;
  rank_kernel<<<blocks_for(cache.num_slots), kThreads, 0, queue>>>(cache, how, array(memory.ranks),
                                                                   array(memory.places), report);
  judge_kernel<<<1, kThreads, 0, queue>>>(cache, array(memory.words), array(memory.begins),
                                          array(memory.firsts), report, array(memory.refused));
  return cudaGetLastError();
}

int bring_rows(const TableCall& call, const RowCacheArrays& cache, const CacheCall& how,
               std::int32_t* slots, void* work, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  const AdmitMemory memory(call.num_positions, cache.num_keys, cache.num_slots);
  const auto array = arrays_in(work);
  const auto n = static_cast<std::uint32_t>(call.num_positions);
  const std::uint32_t num_words = words_of(cache.num_keys);
  list_kernel<<<blocks_for(num_words), kThreads, 0, queue>>>(
      array(memory.words), array(memory.begins), num_words, array(memory.missing));
  std::size_t bytes = memory.sort_bytes;
  const int bits = kRankBits + std::bit_width(static_cast<unsigned>(cache.num_tables - 1));
  const int error = cub::DeviceRadixSort::SortPairs(
      array(memory.temporary), bytes, array(memory.ranks), array(memory.sorted_ranks),
      array(memory.places), array(memory.order), static_cast<int>(cache.num_slots), 0, bits, queue);
  if (error != 0) return error;
  move_kernel<<<blocks_of_warps(), kThreads, 0, queue>>>(cache, how.number, array(memory.missing),
                                                         array(memory.firsts), array(memory.order),
                                                         array(memory.refused));
  translate_kernel<<<blocks_for(n), kThreads, 0, queue>>>(cache, call.ids, array(memory.keys), n,
                                                          slots);
  return cudaGetLastError();
}

int write_back(const RowCacheArrays& cache, bool is_emptied, void* stream) {
  write_back_kernel<<<blocks_of_warps(), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      cache, is_emptied);
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
