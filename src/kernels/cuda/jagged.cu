// Bags of different lengths on CUDA: running sums, moving segments, spreading ids over buckets.

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_scan.cuh>

#include <algorithm>

#include "kernels/cuda/jagged_launch.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ std::int64_t at(const Integers& numbers, std::int64_t i) {
  return numbers.is_wide ? static_cast<const std::int64_t*>(numbers.data)[i]
                         : static_cast<const std::int32_t*>(numbers.data)[i];
}

struct Widen {
  Integers numbers;
  __device__ std::int64_t operator()(std::int64_t i) const { return at(numbers, i); }
};

unsigned blocks_for(std::int64_t threads) {
  // Kernels go round: more blocks than this bring nothing.
  return static_cast<unsigned>(
      std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1, std::int64_t{1} << 16));
}

template <typename To>
int scan(Integers lengths, std::int64_t count, To* offsets, void* work, std::size_t& bytes,
         cudaStream_t stream) {
  const auto wide =
      thrust::make_transform_iterator(thrust::counting_iterator<std::int64_t>(0), Widen{lengths});
  return cub::DeviceScan::InclusiveSum(work, bytes, wide, offsets + 1, count, stream);
}

/// A warp per row.
__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(Integers lengths, std::int64_t rows, std::int64_t columns, std::int64_t* sums) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t row =
           static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
       row < rows; row += warps) {
    long long sum = 0;
    for (std::int64_t c = lane; c < columns; c += 32) sum += at(lengths, row * columns + c);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0U, sum, offset);
    if (lane == 0) sums[row] = sum;
  }
}

/// A thread per word of the output: it finds the segment that the word's row lies in.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const Word* input, std::int64_t words_per_row, const std::int64_t* from,
                const std::int64_t* order, const std::int64_t* to, std::int64_t num_segments,
                std::int64_t num_rows, Word* output) {
  const std::int64_t num_words = num_rows * words_per_row;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < num_words; i += stride) {
    const std::int64_t row = words_per_row == 1 ? i : i / words_per_row;
    std::int64_t low = 0;
    for (std::int64_t high = num_segments - 1; low < high;) {
      const std::int64_t middle = (low + high + 1) / 2;
      if (to[middle] <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const std::int64_t source = from[order[low]] + row - to[low];
    output[i] = input[source * words_per_row + (i - row * words_per_row)];
  }
}

struct Place {
  std::uint64_t bucket;
  std::uint64_t id;
};

/// Where an id goes. It is unsigned here, so that a negative one is far past the last block.
__device__ __forceinline__ Place place_of(std::uint64_t id, const BucketBlocks& blocks,
                                          std::int64_t num_buckets) {
  const auto buckets = static_cast<std::uint64_t>(num_buckets);
  if (blocks.starts == nullptr) {
    const auto block = static_cast<std::uint64_t>(blocks.block_size);
    if (id < block * buckets) {
      const std::uint64_t bucket = id / block;
      return {bucket, id - bucket * block};
    }
  } else if (id < static_cast<std::uint64_t>(blocks.starts[num_buckets])) {
    // The last bucket that does not begin behind the id.
    std::int64_t low = 0;
    for (std::int64_t high = num_buckets - 1; low < high;) {
      const std::int64_t middle = (low + high + 1) / 2;
      if (static_cast<std::uint64_t>(blocks.starts[middle]) <= id) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return {static_cast<std::uint64_t>(low), id - static_cast<std::uint64_t>(blocks.starts[low])};
  }
  return {id % buckets, id / buckets};
}

__device__ __forceinline__ const BucketBlocks& blocks_of(const BucketCall& call, std::int64_t bag) {
  int low = 0;
  for (int high = call.num_features - 1; low < high;) {
    const int middle = (low + high) / 2;
    if (call.features[middle].end_bag <= bag) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return call.features[low];
}

__device__ __forceinline__ Place place_at(const BucketCall& call, const BucketBlocks& blocks,
                                          std::int64_t i) {
  const std::uint64_t id = call.ids.is_wide ? static_cast<const std::uint64_t*>(call.ids.data)[i]
                                            : static_cast<const std::uint32_t*>(call.ids.data)[i];
  return place_of(id, blocks, call.num_buckets);
}

/// kLanes share a bag. Equal buckets among the ids they hold are found by matching, so that the
/// order inside a bag is kept and no two lanes meet at one counter.
template <int kLanes, bool kFills>
__global__ void __launch_bounds__(kThreads)
    bucket_kernel(BucketCall call, std::int64_t* counters, BucketTargets targets) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const unsigned group =
      kLanes == 32 ? ~0U : ((1U << kLanes) - 1U) << (threadIdx.x % 32 / kLanes * kLanes);
  const unsigned below = (1U << (threadIdx.x % 32)) - 1U;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * (kThreads / kLanes);
  for (std::int64_t bag =
           static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
       bag < call.num_bags; bag += stride) {
    const std::int64_t begin = call.offsets[bag];
    const std::int64_t end = call.offsets[bag + 1];
    const BucketBlocks& blocks = blocks_of(call, bag);
    for (std::int64_t base = begin; base < end; base += kLanes) {
      const std::int64_t i = base + lane;
      const bool is_there = i < end;
      const Place place = is_there ? place_at(call, blocks, i) : Place{~0ULL, 0};
      std::int64_t* const counter =
          counters + static_cast<std::int64_t>(place.bucket) * call.num_bags + bag;
      unsigned same = 1U << (threadIdx.x % 32);
      if constexpr (kLanes > 1) same = __match_any_sync(group, place.bucket);
      std::int64_t to = 0;
      if (is_there) to = *counter + __popc(same & below);
      if constexpr (kLanes > 1) __syncwarp(group);  // all have read before one writes
      if (is_there && (same & below) == 0) *counter += __popc(same);
      if constexpr (kLanes > 1) __syncwarp(group);
      if constexpr (kFills) {
        if (!is_there) continue;
        if (call.ids.is_wide) {
          static_cast<std::int64_t*>(targets.ids)[to] = static_cast<std::int64_t>(place.id);
        } else {
          static_cast<std::int32_t*>(targets.ids)[to] = static_cast<std::int32_t>(place.id);
        }
        if (targets.positions != nullptr) {
          if (call.ids.is_wide) {
            static_cast<std::int64_t*>(targets.positions)[to] = i - begin;
          } else {
            static_cast<std::int32_t*>(targets.positions)[to] =
                static_cast<std::int32_t>(i - begin);
          }
        }
        if (targets.place != nullptr) targets.place[i] = to;
        if (targets.from != nullptr) targets.from[to] = i;
      }
    }
  }
}

template <bool kFills>
int start_buckets(const BucketCall& call, std::int64_t* counters, const BucketTargets& targets,
                  cudaStream_t stream) {
  if (call.num_bags == 0) return 0;
  if (call.num_ids >= 4 * call.num_bags) {
    bucket_kernel<8, kFills>
        <<<blocks_for(8 * call.num_bags), kThreads, 0, stream>>>(call, counters, targets);
  } else {
    bucket_kernel<1, kFills>
        <<<blocks_for(call.num_bags), kThreads, 0, stream>>>(call, counters, targets);
  }
  return cudaGetLastError();
}

template <typename Word>
void start_copy(const void* input, std::int64_t row_bytes, const std::int64_t* from,
                const std::int64_t* order, const std::int64_t* to, std::int64_t num_segments,
                std::int64_t num_rows, void* output, cudaStream_t stream) {
  const std::int64_t words = row_bytes / static_cast<std::int64_t>(sizeof(Word));
  copy_kernel<Word><<<blocks_for(num_rows * words), kThreads, 0, stream>>>(
      static_cast<const Word*>(input), words, from, order, to, num_segments, num_rows,
      static_cast<Word*>(output));
}

}  // namespace

std::size_t running_sums_bytes(std::int64_t count) {
  std::size_t bytes = 0;
  scan<std::int64_t>({}, count, nullptr, nullptr, bytes, nullptr);
  std::size_t narrow = 0;
  scan<std::int32_t>({}, count, nullptr, nullptr, narrow, nullptr);
  return std::max<std::size_t>({bytes, narrow, 1});
}

int running_sums(Integers lengths, std::int64_t count, void* offsets, bool to_wide, void* work,
                 std::size_t work_bytes, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  if (const int error = cudaMemsetAsync(offsets, 0, to_wide ? 8 : 4, queue); error != 0) {
    return error;
  }
  if (count == 0) return 0;
  return to_wide
             ? scan(lengths, count, static_cast<std::int64_t*>(offsets), work, work_bytes, queue)
             : scan(lengths, count, static_cast<std::int32_t*>(offsets), work, work_bytes, queue);
}

int row_sums(Integers lengths, std::int64_t rows, std::int64_t columns, std::int64_t* sums,
             void* stream) {
  if (rows == 0) return 0;
  row_sums_kernel<<<blocks_for(32 * rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      lengths, rows, columns, sums);
  return cudaGetLastError();
}

int copy_segments(const void* input, std::int64_t row_bytes, const std::int64_t* from,
                  const std::int64_t* order, const std::int64_t* to, std::int64_t num_segments,
                  std::int64_t num_rows, void* output, void* stream) {
  if (num_rows == 0 || row_bytes == 0 || num_segments == 0) return 0;
  const std::uintptr_t places = reinterpret_cast<std::uintptr_t>(input) |
                                reinterpret_cast<std::uintptr_t>(output) |
                                static_cast<std::uintptr_t>(row_bytes);
  const auto start = [&]<typename Word>() {
    start_copy<Word>(input, row_bytes, from, order, to, num_segments, num_rows, output,
                     static_cast<cudaStream_t>(stream));
  };
  if (places % 16 == 0) {
    start.template operator()<uint4>();
  } else if (places % 8 == 0) {
    start.template operator()<std::uint64_t>();
  } else if (places % 4 == 0) {
    start.template operator()<std::uint32_t>();
  } else {
    start.template operator()<std::uint8_t>();
  }
  return cudaGetLastError();
}

int count_buckets(const BucketCall& call, std::int64_t* counts, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  const auto bytes = static_cast<std::size_t>(call.num_buckets * call.num_bags) * 8;
  if (const int error = cudaMemsetAsync(counts, 0, bytes, queue); error != 0) return error;
  return start_buckets<false>(call, counts, {}, queue);
}

int fill_buckets(const BucketCall& call, std::int64_t* cursors, const BucketTargets& targets,
                 void* stream) {
  return start_buckets<true>(call, cursors, targets, static_cast<cudaStream_t>(stream));
}

}  // namespace tessera::kernels::cuda
