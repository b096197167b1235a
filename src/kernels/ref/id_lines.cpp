// The meaning of kernels/id_lines.h as plain loops: slow, obvious, and the judge of the others.

#include "kernels/id_lines.h"

#include <algorithm>
#include <limits>

namespace tessera::kernels {
namespace {

std::int64_t find(IdLines lines, std::int64_t id) {
  const std::uint64_t hash = hash_id(id);
  const IdLine* segment = lines.lines + lines.directory[hash >> lines.shift] * kLinesPerSegment;
  for (int step = 0; step < kMostLines; ++step) {
    const IdLine& line = segment[(hash + static_cast<unsigned>(step)) % kLinesPerSegment];
    for (int slot = 0; slot < kSlotsPerLine; ++slot) {
      if ((line.occupied >> slot & 1) != 0 && line.keys[slot] == id) return line.rows[slot];
    }
    if (line.overflow == 0) return -1;
  }
  return -1;
}

void find_rows(IdLines lines, const std::int64_t* ids, std::int64_t count, std::int64_t* rows) {
  for (std::int64_t i = 0; i < count; ++i) rows[i] = find(lines, ids[i]);
}

void touch_rows(IdLines lines, RowRecord* records, const std::int64_t* ids,
                const std::int64_t* counts, std::int64_t count, std::uint32_t step,
                std::int64_t* rows, TouchedRecord* before) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  for (std::int64_t i = 0; i < count; ++i) {
    rows[i] = find(lines, ids[i]);
    before[i] = {};
    if (rows[i] < 0) continue;
    RowRecord& record = records[rows[i]];
    before[i] = {record.count, record.last_step};
    const std::uint64_t seen = counts == nullptr ? 1 : static_cast<std::uint64_t>(counts[i]);
    record.count = static_cast<std::uint32_t>(std::min(kMost, record.count + seen));
    record.last_step = step;
  }
}

}  // namespace

const IdLineKernels& id_line_reference() noexcept {
  static const IdLineKernels kernels{find_rows, touch_rows};
  return kernels;
}

}  // namespace tessera::kernels
