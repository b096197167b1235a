// Rows of tables, pooled or one by one. Compiled once per instruction set; see
// kernels/CMakeLists.txt and the note at the top of reduce.cpp.
//
// A block of columns stays in registers while the ids of a bag are walked. The rows are at random
// places in memory, so what counts is how many of them are on their way at a time: each id fetches
// the row of an id some places ahead, across bags.

#include "kernels/table_lookup.h"

#include "kernels/cpu/row_vector.h"

namespace tessera::kernels {
namespace {

constexpr int kBlock = 8;  // vectors that stay in registers

/// `kColumns`: the number of columns, or 0 if it is any.
template <typename Row, int kColumns = 0>
struct Walk {
  const typename Row::Stored* data;
  std::int64_t num_rows;
  std::int64_t num_columns;
  const LookupIds& ids;
  std::int64_t last;   // end of the positions whose rows may be fetched ahead
  std::int64_t ahead;  // in positions
  std::int64_t bad = -1;

  Walk(const LookupIds& ids, const TableFeature& feature, std::int64_t last)
      : data(static_cast<const typename Row::Stored*>(feature.rows.data)),
        num_rows(feature.rows.num_rows),
        num_columns(kColumns > 0 ? kColumns : feature.rows.num_columns),
        ids(ids),
        last(last),
        ahead(rows_ahead(row_bytes())) {}

  std::int64_t columns() const { return kColumns > 0 ? kColumns : num_columns; }
  std::int64_t row_bytes() const {
    return columns() * static_cast<std::int64_t>(sizeof(typename Row::Stored));
  }
  bool is_outside(std::int64_t id) const {
    return static_cast<std::uint64_t>(id) >= static_cast<std::uint64_t>(num_rows);
  }
  TESSERA_INLINE_ALWAYS void fetch(std::int64_t position) const {
    if (position >= last) return;
    const std::int64_t id = ids.id(position);
    if (!is_outside(id)) prefetch(data + id * columns(), row_bytes());
  }
  const typename Row::Stored* row(std::int64_t position) {
    std::int64_t id = ids.id(position);
    if (__builtin_expect(is_outside(id), 0)) {
      if (bad < 0) bad = position;
      id = 0;
    }
    return data + id * columns();
  }
};

/// Columns column .. column + kVectors * kLanes - 1 of one bag.
template <typename Row, int kVectors, int kColumns>
inline void sum_block(Walk<Row, kColumns>& walk, std::int64_t first, std::int64_t last,
                      std::int64_t column, float factor, float* output) {
  Floats sums[kVectors] = {};
  for (std::int64_t k = first; k < last; ++k) {
    if (column == 0) walk.fetch(k + walk.ahead);
    const auto* row = walk.row(k) + column;
    if (walk.ids.weights == nullptr) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[v] += Row::load(row + v * kLanes);
    } else {
      const Floats weight = splat(walk.ids.weights[k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[v] += weight * Row::load(row + v * kLanes);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(output + column + v * kLanes, sums[v] * factor);
}

/// The last few columns.
template <typename Row, int kColumns>
inline void sum_tail(Walk<Row, kColumns>& walk, std::int64_t first, std::int64_t last,
                     std::int64_t column, float factor, float* output) {
  float sums[kLanes] = {};
  const std::int64_t count = walk.columns() - column;
  for (std::int64_t k = first; k < last; ++k) {
    if (column == 0) walk.fetch(k + walk.ahead);
    const auto* row = walk.row(k) + column;
    const float weight = walk.ids.weights == nullptr ? 1.0F : walk.ids.weights[k];
    for (std::int64_t c = 0; c < count; ++c) sums[c] += weight * Row::widen(row[c]);
  }
  for (std::int64_t c = 0; c < count; ++c) output[column + c] = sums[c] * factor;
}

template <typename Row, int kColumns>
std::int64_t pool_rows(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                       std::int64_t end, float* output) {
  Walk<Row, kColumns> walk(ids, feature, ids.offset(feature.first_bag + end));
  std::int64_t first = ids.offset(feature.first_bag + begin);
  for (std::int64_t k = first; k < first + walk.ahead; ++k) walk.fetch(k);
  for (std::int64_t bag = begin; bag < end; ++bag) {
    const std::int64_t last = ids.offset(feature.first_bag + bag + 1);
    float* to = output + feature.output + bag * feature.output_stride;
    const float factor =
        feature.is_mean && last > first ? 1.0F / static_cast<float>(last - first) : 1.0F;
    std::int64_t column = 0;
    const auto left = [&] { return (walk.columns() - column) / kLanes; };
    for (; left() >= kBlock; column += kBlock * kLanes) {
      sum_block<Row, kBlock>(walk, first, last, column, factor, to);
    }
    if (left() >= 4) {
      sum_block<Row, 4>(walk, first, last, column, factor, to);
      column += 4 * kLanes;
    }
    if (left() >= 2) {
      sum_block<Row, 2>(walk, first, last, column, factor, to);
      column += 2 * kLanes;
    }
    if (left() >= 1) {
      sum_block<Row, 1>(walk, first, last, column, factor, to);
      column += kLanes;
    }
    if (column < walk.columns()) sum_tail<Row>(walk, first, last, column, factor, to);
    first = last;
  }
  return walk.bad;
}

template <typename Row>
std::int64_t copy_rows(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                       std::int64_t end, float* output) {
  const std::int64_t start = ids.offset(feature.first_bag);
  Walk<Row> walk(ids, feature, start + end);
  for (std::int64_t k = start + begin; k < start + end; ++k) {
    walk.fetch(k + walk.ahead);
    const auto* row = walk.row(k);
    float* to = output + feature.output + (k - start) * walk.num_columns;
    const float weight = ids.weights == nullptr ? 1.0F : ids.weights[k];
    std::int64_t c = 0;
    for (; c + kLanes <= walk.num_columns; c += kLanes) store(to + c, Row::load(row + c) * weight);
    for (; c < walk.num_columns; ++c) to[c] = Row::widen(row[c]) * weight;
  }
  return walk.bad;
}

template <typename Row>
void weight_rows(const LookupIds& ids, const TableFeature& feature, bool is_sequence,
                 std::int64_t begin, std::int64_t end, const float* gradient, float* output) {
  const std::int64_t start = ids.offset(feature.first_bag);
  Walk<Row> walk(ids, feature, ids.offset(feature.first_bag + end));
  for (std::int64_t bag = begin; bag < end; ++bag) {
    const std::int64_t first = ids.offset(feature.first_bag + bag);
    const std::int64_t last = ids.offset(feature.first_bag + bag + 1);
    const float factor = feature.is_mean && !is_sequence && last > first
                             ? 1.0F / static_cast<float>(last - first)
                             : 1.0F;
    for (std::int64_t k = first; k < last; ++k) {
      walk.fetch(k + walk.ahead);
      const float* of_bag =
          gradient + feature.output +
          (is_sequence ? (k - start) * walk.num_columns : bag * feature.output_stride);
      output[k] = factor * dot<Row>(walk.row(k), of_bag, walk.num_columns);
    }
  }
}

/// A table without rows: bags are empty sums, and every id is outside.
std::int64_t first_position(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                            std::int64_t end) {
  const std::int64_t first = ids.offset(feature.first_bag + begin);
  return ids.offset(feature.first_bag + end) > first ? first : -1;
}

std::int64_t pooled(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                    std::int64_t end, float* output) {
  if (feature.rows.num_rows == 0) {
    for (std::int64_t bag = begin; bag < end; ++bag) {
      float* to = output + feature.output + bag * feature.output_stride;
      for (std::int64_t c = 0; c < feature.rows.num_columns; ++c) to[c] = 0;
    }
    return first_position(ids, feature, begin, end);
  }
  return with_row(feature.rows.element, [&](auto row) {
    using Row = decltype(row);
    if constexpr (sizeof(typename Row::Stored) == 4) {
      if (feature.rows.num_columns == 32) {
        return pool_rows<Row, 32>(ids, feature, begin, end, output);
      }
      if (feature.rows.num_columns == 64) {
        return pool_rows<Row, 64>(ids, feature, begin, end, output);
      }
    }
    return pool_rows<Row, 0>(ids, feature, begin, end, output);
  });
}

std::int64_t sequence(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                      std::int64_t end, float* output) {
  if (feature.rows.num_rows == 0) {
    float* to = output + feature.output;
    for (std::int64_t i = begin * feature.rows.num_columns; i < end * feature.rows.num_columns;
         ++i) {
      to[i] = 0;
    }
    return end > begin ? ids.offset(feature.first_bag) + begin : -1;
  }
  return with_row(feature.rows.element, [&](auto row) {
    return copy_rows<decltype(row)>(ids, feature, begin, end, output);
  });
}

void weight_gradient(const LookupIds& ids, const TableFeature& feature, bool is_sequence,
                     std::int64_t begin, std::int64_t end, const float* gradient, float* output) {
  if (feature.rows.num_rows == 0) {
    const std::int64_t last = ids.offset(feature.first_bag + end);
    for (std::int64_t k = ids.offset(feature.first_bag + begin); k < last; ++k) output[k] = 0;
    return;
  }
  with_row(feature.rows.element, [&](auto row) {
    weight_rows<decltype(row)>(ids, feature, is_sequence, begin, end, gradient, output);
  });
}

}  // namespace

extern const TableLookupKernels TESSERA_KERNEL_TABLE(kTableLookup);
const TableLookupKernels TESSERA_KERNEL_TABLE(kTableLookup){pooled, sequence, weight_gradient};

}  // namespace tessera::kernels
