// Finds ids in lines of five. Compiled once per instruction set; see kernels/CMakeLists.txt. Ids
// are taken in blocks: while one block is compared, the lines of the next ones are on their way.

#include "kernels/id_lines.h"

#include <cstddef>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tessera::kernels {
namespace {

// 32 lines on their way at a time: more than a core's line fill buffers, and few enough for its
// first-level cache.
constexpr int kBlock = 32;

/// The hashes of a block and the lines its ids belong to, asked for.
struct Block {
  std::uint64_t hashes[kBlock];
  const IdLine* segments[kBlock];
};

void hash_block(const std::int64_t* ids, int count, std::uint64_t* hashes) {
  if (count == kBlock) {
    for (int i = 0; i < kBlock; ++i) hashes[i] = hash_id(ids[i]);  // in vectors
  } else {
    for (int i = 0; i < count; ++i) hashes[i] = hash_id(ids[i]);
  }
}

void ask_for(IdLines lines, const std::int64_t* ids, int count, Block& block) {
  hash_block(ids, count, block.hashes);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t hash = block.hashes[i];
    const IdLine* segment =
        lines.lines + static_cast<std::size_t>(lines.directory[hash >> lines.shift]) *
                          static_cast<std::size_t>(kLinesPerSegment);
    block.segments[i] = segment;
    __builtin_prefetch(segment + hash % kLinesPerSegment);
  }
}

/// A bit for every occupied slot that holds the id.
inline unsigned slots_with(const IdLine& line, std::int64_t id) {
#if defined(__AVX512F__)
  const __m512i whole = _mm512_load_si512(&line);
  return _mm512_cmpeq_epi64_mask(whole, _mm512_set1_epi64(id)) & line.occupied;
#elif defined(__AVX2__)
  const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(&line));
  const __m256i equal = _mm256_cmpeq_epi64(low, _mm256_set1_epi64x(id));
  auto bits = static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(equal)));
  bits |= static_cast<unsigned>(line.keys[4] == id) << 4;
  return bits & line.occupied;
#else
  unsigned bits = 0;
  for (int slot = 0; slot < kSlotsPerLine; ++slot) {
    bits |= static_cast<unsigned>(line.keys[slot] == id) << slot;
  }
  return bits & line.occupied;
#endif
}

[[gnu::noinline]] std::int64_t find_behind(const IdLine* segment, std::uint64_t hash,
                                           std::int64_t id) {
  for (unsigned step = 1; step < kMostLines; ++step) {
    const IdLine& line = segment[(hash + step) % kLinesPerSegment];
    const unsigned slots = slots_with(line, id);
    if (slots != 0) return line.rows[__builtin_ctz(slots)];
    if (line.overflow == 0) return -1;
  }
  return -1;
}

inline std::int64_t find(const IdLine* segment, std::uint64_t hash, std::int64_t id) {
  const IdLine& line = segment[hash % kLinesPerSegment];
  const unsigned slots = slots_with(line, id);
  if (slots != 0) [[likely]] {
    return line.rows[__builtin_ctz(slots)];
  }
  return line.overflow == 0 ? -1 : find_behind(segment, hash, id);
}

int block_size(std::int64_t begin, std::int64_t count) {
  return count - begin < kBlock ? static_cast<int>(count - begin) : kBlock;
}

/// Calls `found(begin, block, size)` for every block, its lines asked for one block earlier.
template <typename Found>
void for_blocks(IdLines lines, const std::int64_t* ids, std::int64_t count, const Found& found) {
  Block blocks[2];
  if (count > 0) ask_for(lines, ids, block_size(0, count), blocks[0]);
  for (std::int64_t begin = 0, number = 0; begin < count; begin += kBlock, ++number) {
    const std::int64_t next = begin + kBlock;
    if (next < count) ask_for(lines, ids + next, block_size(next, count), blocks[(number + 1) % 2]);
    found(begin, blocks[number % 2], block_size(begin, count));
  }
}

void find_rows(IdLines lines, const std::int64_t* ids, std::int64_t count, std::int64_t* rows) {
  for_blocks(lines, ids, count, [&](std::int64_t begin, const Block& block, int size) {
    for (int i = 0; i < size; ++i) {
      rows[begin + i] = find(block.segments[i], block.hashes[i], ids[begin + i]);
    }
  });
}

void touch_block(RowRecord* records, const std::int64_t* rows, const std::int64_t* counts, int size,
                 std::uint32_t step, TouchedRecord* before) {
  for (int i = 0; i < size; ++i) {
    before[i] = {};
    if (rows[i] < 0) continue;
    RowRecord& record = records[rows[i]];
    before[i] = {record.count, record.last_step};
    const std::uint64_t sum =
        record.count + (counts == nullptr ? 1 : static_cast<std::uint64_t>(counts[i]));
    record.count = sum > 0xffffffffU ? 0xffffffffU : static_cast<std::uint32_t>(sum);
    record.last_step = step;
  }
}

void touch_rows(IdLines lines, RowRecord* records, const std::int64_t* ids,
                const std::int64_t* counts, std::int64_t count, std::uint32_t step,
                std::int64_t* rows, TouchedRecord* before) {
  // The records of a block are asked for when their rows are known, and touched a block later.
  for_blocks(lines, ids, count, [&](std::int64_t begin, const Block& block, int size) {
    for (int i = 0; i < size; ++i) {
      const std::int64_t row = find(block.segments[i], block.hashes[i], ids[begin + i]);
      rows[begin + i] = row;
      if (row >= 0) __builtin_prefetch(records + row, 1);
    }
    if (begin > 0) {
      const std::int64_t last = begin - kBlock;
      touch_block(records, rows + last, counts == nullptr ? nullptr : counts + last, kBlock, step,
                  before + last);
    }
  });
  if (count > 0) {
    const std::int64_t last = (count - 1) / kBlock * kBlock;
    touch_block(records, rows + last, counts == nullptr ? nullptr : counts + last,
                static_cast<int>(count - last), step, before + last);
  }
}

}  // namespace

extern const IdLineKernels TESSERA_KERNEL_TABLE(kIdLines);
const IdLineKernels TESSERA_KERNEL_TABLE(kIdLines){find_rows, touch_rows};

}  // namespace tessera::kernels
