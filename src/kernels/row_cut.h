// src/kernels/row_cut.h — ids of a table that is cut by rows, to the parts that hold them.
//
// Part p holds the rows starts[p] to starts[p + 1] - 1; starts[0] is 0. An id outside the table
// counts as id 0.
//
//   count_parts:  for bag b, for each id of it:   ++lengths[p][b]        with p the part of the id
//   fill_parts:   for each id i, in order:        at = cursor[p]++
//                   ids_out[at] = id - starts[p];  weights_out[at] = weights[i];  source[at] = i
//
// Ids are taken in order, so those of a part lie bag by bag. One version: nothing here gains from a
// wider instruction set.

#pragma once

#include <cstdint>

namespace tessera::kernels {

template <typename Id>
struct RowCut {
  const Id* ids;
  std::int64_t num_ids;
  const std::int64_t* starts;  // num_parts + 1
  std::int64_t num_parts;
};

/// `bag_lengths` are the numbers of ids of the bags, `lengths[p]` num_bags numbers that start as 0.
template <typename Id, typename Length>
void count_parts(const RowCut<Id>& cut, const Length* bag_lengths, std::int64_t num_bags,
                 std::int32_t* const* lengths) noexcept;

/// What moves along with the ids; null for what does not. `source` counts from `first_source`.
struct RowCutExtras {
  const float* weights = nullptr;
  float* weights_out = nullptr;
  std::int64_t* source = nullptr;
  std::int64_t first_source = 0;
};

template <typename Id>
void fill_parts(const RowCut<Id>& cut, const RowCutExtras& extras, std::int64_t* cursor,
                Id* ids_out) noexcept;

}  // namespace tessera::kernels
