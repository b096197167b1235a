// src/kernels/cuda/jagged_launch.h — starts the kernels on bags of different lengths on CUDA. No
// torch header, no CUDA header; pointers are device pointers and `stream` is a cudaStream_t. Each
// function returns a cudaError_t (0 is success) and waits for nothing. kernels/jagged.h says what
// they compute.

#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::kernels::cuda {

/// int32 or int64 numbers.
struct Integers {
  const void* data = nullptr;
  bool is_wide = true;
};

/// Bytes of the work memory of running_sums.
std::size_t running_sums_bytes(std::int64_t count);
/// offsets[0] = 0; offsets[i + 1] = offsets[i] + lengths[i], wrapping around. `offsets` is int64 if
/// `to_wide`.
int running_sums(Integers lengths, std::int64_t count, void* offsets, bool to_wide, void* work,
                 std::size_t work_bytes, void* stream);

/// sums[r] = the sum of lengths[r * columns] .. lengths[(r + 1) * columns - 1].
int row_sums(Integers lengths, std::int64_t rows, std::int64_t columns, std::int64_t* sums,
             void* stream);

/// Rows to[s] .. of output = rows from[order[s]] .. of input, for all segments s. `to` has
/// num_segments + 1 numbers; the last is `num_rows`, and no more than that many are written.
int copy_segments(const void* input, std::int64_t row_bytes, const std::int64_t* from,
                  const std::int64_t* order, const std::int64_t* to, std::int64_t num_segments,
                  std::int64_t num_rows, void* output, void* stream);

/// The blocks of one feature, on the device. `starts`, its num_buckets + 1 first ids, is null for
/// even blocks.
struct BucketBlocks {
  std::int64_t end_bag = 0;  // the first bag of the next feature
  std::int64_t block_size = 1;
  const std::int64_t* starts = nullptr;
};
struct BucketCall {
  Integers ids;
  std::int64_t num_ids = 0;
  const std::int64_t* offsets = nullptr;  // of the bags, num_bags + 1
  std::int64_t num_bags = 0;
  std::int64_t num_buckets = 1;
  const BucketBlocks* features = nullptr;
  int num_features = 0;
};
/// counts[bucket * num_bags + bag] = ids of the bag that go there.
int count_buckets(const BucketCall& call, std::int64_t* counts, void* stream);
/// What moves along; null for what is not wanted.
struct BucketTargets {
  void* ids = nullptr;  // as wide as those of the call, and so are the positions
  void* positions = nullptr;
  std::int64_t* place = nullptr;  // of each element of the input
  std::int64_t* from = nullptr;   // of each element of the output
};
/// `cursors` are the running sums of the counts; they are used up.
int fill_buckets(const BucketCall& call, std::int64_t* cursors, const BucketTargets& targets,
                 void* stream);

}  // namespace tessera::kernels::cuda
