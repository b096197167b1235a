#include "kernels/jagged.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

namespace tessera::kernels {

namespace {

/// Where running_sums goes wrong.
template <typename T>
std::int64_t first_bad_length(const T* lengths, std::int64_t count) noexcept {
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (lengths[i] < 0 || std::numeric_limits<T>::max() - sum < lengths[i]) return i;
    sum += lengths[i];
  }
  return -1;
}

}  // namespace

template <typename T>
std::int64_t running_sums(const T* __restrict__ lengths, std::int64_t count,
                          T* __restrict__ offsets) noexcept {
  // Four at a time, so that only one addition in four waits for the one before. Sums wrap around;
  // whether one did is asked at the end: no length is larger than the bits of all together.
  using Bits = std::make_unsigned_t<T>;
  Bits sum = 0;
  Bits bits = 0;
  offsets[0] = 0;
  T* to = offsets + 1;
  std::int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const auto first = static_cast<Bits>(lengths[i]);
    const auto second = static_cast<Bits>(lengths[i + 1]);
    const auto third = static_cast<Bits>(lengths[i + 2]);
    const auto fourth = static_cast<Bits>(lengths[i + 3]);
    bits |= first | second | third | fourth;
    const Bits two = first + second;
    to[i] = static_cast<T>(sum + first);
    to[i + 1] = static_cast<T>(sum + two);
    to[i + 2] = static_cast<T>(sum + two + third);
    sum += two + (third + fourth);
    to[i + 3] = static_cast<T>(sum);
  }
  for (; i < count; ++i) {
    bits |= static_cast<Bits>(lengths[i]);
    to[i] = static_cast<T>(sum += static_cast<Bits>(lengths[i]));
  }
  const auto most = static_cast<std::uint64_t>(std::numeric_limits<T>::max());
  const bool is_good = count == 0 || bits <= most / static_cast<std::uint64_t>(count);
  return is_good ? -1 : first_bad_length(lengths, count);
}

void copy_segments(const char* input, std::int64_t row_bytes, const std::int64_t* from,
                   const std::int64_t* order, const std::int64_t* to, std::int64_t begin,
                   std::int64_t end, char* output) noexcept {
  for (std::int64_t s = begin; s < end; ++s) {
    const std::int64_t first = from[order[s]];
    const std::int64_t rows = from[order[s] + 1] - first;
    if (rows > 0) {
      std::memcpy(output + to[s] * row_bytes, input + first * row_bytes,
                  static_cast<std::size_t>(rows * row_bytes));
    }
  }
}

void copy_to_rows(const char* values, std::int64_t row_bytes, const std::int64_t* offsets,
                  std::int64_t max_length, std::int64_t begin, std::int64_t end,
                  char* dense) noexcept {
  for (std::int64_t b = begin; b < end; ++b) {
    const std::int64_t rows = std::min(offsets[b + 1] - offsets[b], max_length);
    if (rows > 0) {
      std::memcpy(dense + b * max_length * row_bytes, values + offsets[b] * row_bytes,
                  static_cast<std::size_t>(rows * row_bytes));
    }
  }
}

void copy_from_rows(const char* dense, std::int64_t row_bytes, const std::int64_t* offsets,
                    std::int64_t max_length, std::int64_t begin, std::int64_t end,
                    char* values) noexcept {
  for (std::int64_t b = begin; b < end; ++b) {
    const std::int64_t length = offsets[b + 1] - offsets[b];
    const std::int64_t rows = std::min(length, max_length);
    char* bag = values + offsets[b] * row_bytes;
    if (rows > 0) {
      std::memcpy(bag, dense + b * max_length * row_bytes,
                  static_cast<std::size_t>(rows * row_bytes));
    }
    if (length > rows) {
      std::memset(bag + rows * row_bytes, 0, static_cast<std::size_t>((length - rows) * row_bytes));
    }
  }
}

namespace {

// Where an id goes. Ids are unsigned here, so that a negative one is far past the last block.
template <typename Unsigned>
struct Place {
  Unsigned bucket;
  Unsigned id;
};

template <typename Unsigned>
inline Place<Unsigned> place_of(Unsigned id, const Blocks& blocks,
                                std::int64_t num_buckets) noexcept {
  const auto buckets = static_cast<Unsigned>(num_buckets);
  const auto wide = static_cast<std::uint64_t>(id);
  if (blocks.starts == nullptr) {
    const auto block = static_cast<std::uint64_t>(blocks.block_size);
    if (wide < block * static_cast<std::uint64_t>(num_buckets)) {
      return {static_cast<Unsigned>(wide / block), static_cast<Unsigned>(wide % block)};
    }
  } else if (wide < static_cast<std::uint64_t>(blocks.starts[num_buckets])) {
    const auto* after = std::upper_bound(blocks.starts, blocks.starts + num_buckets + 1,
                                         static_cast<std::int64_t>(wide));
    const auto bucket = after - blocks.starts - 1;
    return {static_cast<Unsigned>(bucket),
            static_cast<Unsigned>(wide - static_cast<std::uint64_t>(blocks.starts[bucket]))};
  }
  return {static_cast<Unsigned>(id % buckets), static_cast<Unsigned>(id / buckets)};
}

}  // namespace

template <typename Id>
void count_buckets(const BucketTask<Id>& task, const Blocks& blocks, std::int64_t begin,
                   std::int64_t end, std::int64_t* lengths_out) noexcept {
  using Unsigned = std::make_unsigned_t<Id>;
  for (std::int64_t b = begin; b < end; ++b) {
    for (std::int64_t i = task.offsets[b]; i < task.offsets[b + 1]; ++i) {
      const auto place = place_of(static_cast<Unsigned>(task.ids[i]), blocks, task.num_buckets);
      ++lengths_out[static_cast<std::int64_t>(place.bucket) * task.num_bags + b];
    }
  }
}

template <typename Id>
void fill_buckets(const BucketTask<Id>& task, const Blocks& blocks, std::int64_t begin,
                  std::int64_t end, std::int64_t* cursor, const BucketOutput<Id>& output) noexcept {
  using Unsigned = std::make_unsigned_t<Id>;
  for (std::int64_t b = begin; b < end; ++b) {
    for (std::int64_t i = task.offsets[b]; i < task.offsets[b + 1]; ++i) {
      const auto place = place_of(static_cast<Unsigned>(task.ids[i]), blocks, task.num_buckets);
      const std::int64_t at = cursor[static_cast<std::int64_t>(place.bucket) * task.num_bags + b]++;
      output.ids[at] = static_cast<Id>(place.id);
      if (output.positions != nullptr) {
        output.positions[at] = static_cast<Id>(i - task.offsets[b]);
      }
      if (output.place != nullptr) output.place[i] = at;
    }
  }
}

template <typename Id>
std::int64_t first_outside(const Id* ids, std::int64_t begin, std::int64_t end,
                           std::int64_t limit) noexcept {
  using Unsigned = std::make_unsigned_t<Id>;
  for (std::int64_t i = begin; i < end; ++i) {
    if (static_cast<std::uint64_t>(static_cast<Unsigned>(ids[i])) >=
        static_cast<std::uint64_t>(limit)) {
      return i;
    }
  }
  return -1;
}

template std::int64_t running_sums(const std::int32_t*, std::int64_t, std::int32_t*) noexcept;
template std::int64_t running_sums(const std::int64_t*, std::int64_t, std::int64_t*) noexcept;
template void count_buckets(const BucketTask<std::int32_t>&, const Blocks&, std::int64_t,
                            std::int64_t, std::int64_t*) noexcept;
template void count_buckets(const BucketTask<std::int64_t>&, const Blocks&, std::int64_t,
                            std::int64_t, std::int64_t*) noexcept;
template void fill_buckets(const BucketTask<std::int32_t>&, const Blocks&, std::int64_t,
                           std::int64_t, std::int64_t*, const BucketOutput<std::int32_t>&) noexcept;
template void fill_buckets(const BucketTask<std::int64_t>&, const Blocks&, std::int64_t,
                           std::int64_t, std::int64_t*, const BucketOutput<std::int64_t>&) noexcept;
template std::int64_t first_outside(const std::int32_t*, std::int64_t, std::int64_t,
                                    std::int64_t) noexcept;
template std::int64_t first_outside(const std::int64_t*, std::int64_t, std::int64_t,
                                    std::int64_t) noexcept;

}  // namespace tessera::kernels
