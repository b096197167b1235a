// src/kernels/table_update.h — sums the gradients of equal rows and steps each row once.
//
// `entries` is sorted; begin and end do not cut through the entries of one row.
//
//   update:    for each row among entries begin .. end - 1:
//                g = sum of its entries' gradients, in order
//                step the row and its state by g
//   sum_rows:  the same sums, written to output + i * num_columns: i counts rows from 0, or is the
//              row itself if `by_row`
//
// `buffer` holds buffer_floats(num_columns) numbers and belongs to the calling thread.

#pragma once

#include "kernels/dispatch.h"
#include "kernels/table_rows.h"

namespace tessera::kernels {

struct TableUpdateKernels {
  void (*update)(const RowGradients& gradients, const RowEntry* entries, std::int64_t begin,
                 std::int64_t end, const TableRows& rows, const RowState& state,
                 const RowStep& step, float* buffer);
  void (*sum_rows)(const RowGradients& gradients, const RowEntry* entries, std::int64_t begin,
                   std::int64_t end, std::int64_t num_columns, bool by_row, float* output,
                   float* buffer);
};

constexpr std::int64_t buffer_floats(std::int64_t num_columns) { return 3 * num_columns; }

const TableUpdateKernels* table_update_kernels(Isa isa) noexcept;
const TableUpdateKernels& table_update_kernels() noexcept;
const TableUpdateKernels& table_update_reference() noexcept;

}  // namespace tessera::kernels
