#include "checkpoint/stored_region.h"

#include <algorithm>
#include <cstring>

#include "checkpoint/json.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/error.h"

namespace tessera::checkpoint {
namespace {

using json::corrupt;

// What a disk of some gigabytes per second delivers while one chunk is summed and copied, and more.
constexpr std::uint64_t kAheadBytes = 6 * kChunkBytes;

std::uint64_t product(const std::vector<std::int64_t>& sizes, std::size_t first = 0) {
  std::uint64_t count = 1;
  for (std::size_t i = first; i < sizes.size(); ++i) count *= static_cast<std::uint64_t>(sizes[i]);
  return count;
}

}  // namespace

void check_region(const TensorInfo& tensor, const Region& region) {
  bool is_inside =
      region.offsets.size() == tensor.shape.size() && region.lengths.size() == tensor.shape.size();
  for (std::size_t i = 0; is_inside && i < tensor.shape.size(); ++i) {
    is_inside = region.offsets[i] >= 0 && region.lengths[i] >= 0 &&
                region.lengths[i] <= tensor.shape[i] &&
                region.offsets[i] <= tensor.shape[i] - region.lengths[i];
  }
  if (is_inside) return;
  throw Error(ErrorKind::kInvalid, "checkpoint: region " + text_of(region.offsets) + " of " +
                                       text_of(region.lengths) + " leaves tensor '" + tensor.name +
                                       "' of shape " + text_of(tensor.shape) + ".");
}

void Chunks::copy(std::uint64_t begin, std::uint64_t count, std::byte* target) {
  while (count > 0) {
    const std::uint64_t chunk = begin / kChunkBytes;
    const std::uint64_t first = chunk * kChunkBytes;
    const std::uint64_t last = std::min(first + kChunkBytes, num_bytes_);
    const std::uint64_t here = std::min(last - begin, count);
    if (here == last - first) {
      load(chunk, first, last, target);
    } else {
      if (held_ != chunk) {
        buffer_.resize(last - first);
        load(chunk, first, last, buffer_.data());
        held_ = chunk;
      }
      std::memcpy(target, buffer_.data() + (begin - first), here);
    }
    begin += here;
    count -= here;
    target += here;
  }
}

std::uint64_t Chunks::check(std::uint64_t chunk, std::vector<std::byte>& buffer) {
  const std::uint64_t first = chunk * kChunkBytes;
  const std::uint64_t last = std::min(first + kChunkBytes, num_bytes_);
  expect(record_.begin + first);
  std::uint32_t sum = 0;
  for (std::uint64_t begin = first; begin < last; begin += buffer.size()) {
    const std::uint64_t count = std::min<std::uint64_t>(buffer.size(), last - begin);
    file_.read(record_.begin + begin, buffer.data(), count);
    sum = crc32c(buffer.data(), count, sum);
  }
  compare(chunk, first, last, sum);
  return last - first;
}

void Chunks::load(std::uint64_t chunk, std::uint64_t first, std::uint64_t last, std::byte* target) {
  expect(record_.begin + first);
  file_.read(record_.begin + first, target, last - first);
  if (record_.chunk_crcs.empty()) return;  // of a stranger; nothing to compare with
  compare(chunk, first, last, crc32c(target, last - first));
}

// The chunks that follow, also of the next tensor, come from the disk while this one is summed.
void Chunks::expect(std::uint64_t place) {
  const std::uint64_t ahead = expected_ == 0 ? place : expected_;
  if (ahead >= place + kAheadBytes) return;
  file_.expect(ahead, place + kAheadBytes - ahead);
  expected_ = place + kAheadBytes;
}

void Chunks::compare(std::uint64_t chunk, std::uint64_t first, std::uint64_t last,
                     std::uint32_t sum) {
  if (sum == record_.chunk_crcs[chunk]) return;
  corrupt(file_.path(), "tensor '" + tensor_ + "' was changed between bytes " +
                            std::to_string(record_.begin + first) + " and " +
                            std::to_string(record_.begin + last));
}

void copy_common(const RegionRecord& record, const Region& wanted, std::uint64_t element_bytes,
                 Chunks& chunks, std::byte* data) {
  const Region& stored = record.region;
  const std::size_t rank = stored.offsets.size();
  Region common{std::vector<std::int64_t>(rank), std::vector<std::int64_t>(rank)};
  for (std::size_t i = 0; i < rank; ++i) {
    common.offsets[i] = std::max(stored.offsets[i], wanted.offsets[i]);
    const std::int64_t end =
        std::min(stored.offsets[i] + stored.lengths[i], wanted.offsets[i] + wanted.lengths[i]);
    common.lengths[i] = end - common.offsets[i];
    if (common.lengths[i] <= 0) return;
  }
  // Dimensions from `inner` on are whole on both sides, so a step of dimension inner - 1 is one
  // run.
  std::size_t inner = rank;
  while (inner > 0 && common.lengths[inner - 1] == stored.lengths[inner - 1] &&
         common.lengths[inner - 1] == wanted.lengths[inner - 1]) {
    --inner;
  }
  const std::size_t outer = inner > 0 ? inner - 1 : 0;
  std::uint64_t run_bytes = element_bytes * product(common.lengths, inner);
  if (inner > 0) run_bytes *= static_cast<std::uint64_t>(common.lengths[inner - 1]);

  std::vector<std::int64_t> index(outer, 0);
  for (;;) {
    std::uint64_t from = 0;
    std::uint64_t to = 0;
    for (std::size_t i = 0; i < rank; ++i) {
      const std::int64_t place = common.offsets[i] + (i < outer ? index[i] : 0);
      from = from * static_cast<std::uint64_t>(stored.lengths[i]) +
             static_cast<std::uint64_t>(place - stored.offsets[i]);
      to = to * static_cast<std::uint64_t>(wanted.lengths[i]) +
           static_cast<std::uint64_t>(place - wanted.offsets[i]);
    }
    chunks.copy(from * element_bytes, run_bytes, data + to * element_bytes);
    std::size_t i = outer;
    while (i > 0 && ++index[i - 1] == common.lengths[i - 1]) index[--i] = 0;
    if (i == 0) return;
  }
}

}  // namespace tessera::checkpoint
