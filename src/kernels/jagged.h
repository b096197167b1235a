// src/kernels/jagged.h — moving bags of different lengths.
//
// All of these move bytes and count; none gains from a wider instruction set, so there is one
// version of each.
//
//   running_sums:    offsets[0] = 0; offsets[i + 1] = offsets[i] + lengths[i]
//                    Returns the first i with a negative length or a sum that T cannot hold, else
//                    -1
//
//   copy_segments:   for s in begin .. end - 1:
//                      rows to[s] .. of output = rows from[order[s]] .. from[order[s] + 1] - 1 of
//                      input
//
//   copy_to_rows:    for b in begin .. end - 1, for j < min(length of bag b, max_length):
//                      dense[b][j] = values[offsets[b] + j]
//   copy_from_rows:  the other way round; elements at j >= max_length become zero bytes
//
//   count_buckets:   for bag b of feature f in begin .. end - 1, for each id of it:
//                      lengths_out[bucket(id) * num_bags + b] += 1
//   fill_buckets:    the same walk; cursor[bucket * num_bags + b] says where the next id goes
//
//   first_outside:   the first i in begin .. end - 1 with ids[i] not in [0, limit), else -1

#pragma once

#include <cstdint>

namespace tessera::kernels {

template <typename T>
std::int64_t running_sums(const T* lengths, std::int64_t count, T* offsets) noexcept;

/// `row_bytes` is the size of one element with its trailing dimensions.
void copy_segments(const char* input, std::int64_t row_bytes, const std::int64_t* from,
                   const std::int64_t* order, const std::int64_t* to, std::int64_t begin,
                   std::int64_t end, char* output) noexcept;

void copy_to_rows(const char* values, std::int64_t row_bytes, const std::int64_t* offsets,
                  std::int64_t max_length, std::int64_t begin, std::int64_t end,
                  char* dense) noexcept;
void copy_from_rows(const char* dense, std::int64_t row_bytes, const std::int64_t* offsets,
                    std::int64_t max_length, std::int64_t begin, std::int64_t end,
                    char* values) noexcept;

/// The blocks of one feature. `starts` is null for even blocks.
struct Blocks {
  std::int64_t first_bag;  // bags first_bag .. end_bag - 1 belong to the feature
  std::int64_t end_bag;
  std::int64_t block_size;
  const std::int64_t* starts;  // num_buckets + 1 ids
};

template <typename Id>
struct BucketTask {
  const Id* ids;
  const std::int64_t* offsets;  // of the bags, num_bags + 1
  std::int64_t num_bags;
  std::int64_t num_buckets;
};

template <typename Id>
void count_buckets(const BucketTask<Id>& task, const Blocks& blocks, std::int64_t begin,
                   std::int64_t end, std::int64_t* lengths_out) noexcept;

/// What moves along with the ids; null for what is not wanted.
template <typename Id>
struct BucketOutput {
  Id* ids;
  Id* positions;
  std::int64_t* place;  // of each element of the input
};

template <typename Id>
void fill_buckets(const BucketTask<Id>& task, const Blocks& blocks, std::int64_t begin,
                  std::int64_t end, std::int64_t* cursor, const BucketOutput<Id>& output) noexcept;

template <typename Id>
std::int64_t first_outside(const Id* ids, std::int64_t begin, std::int64_t end,
                           std::int64_t limit) noexcept;

}  // namespace tessera::kernels
