// src/kernels/table_lookup.h — reads rows of embedding tables, pooled or one by one.
//
//   pooled:    for bags b in begin .. end - 1 of the feature, with positions k of the bag in order:
//                output[feature.output + b * output_stride + c] =
//                    sum over k of weight(k) * rows[id(k)][c], divided by the number of ids if mean
//   sequence:  for positions k in begin .. end - 1, counted from the feature's first:
//                output[feature.output + k * num_columns + c] = weight(k) * rows[id(k)][c]
//   weight_gradient: for the positions k of bags begin .. end - 1:
//                output[k] = sum over c of gradient(k)[c] * rows[id(k)][c], where gradient(k) is
//                the gradient of the bag (divided as above) or, for sequences, of the position
//
// An id outside the table counts as 0; nothing is added if there is no row 0. `pooled` and
// `sequence` return the first position with such an id, or -1.

#pragma once

#include "kernels/dispatch.h"
#include "kernels/table_rows.h"

namespace tessera::kernels {

struct TableLookupKernels {
  std::int64_t (*pooled)(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                         std::int64_t end, float* output);
  std::int64_t (*sequence)(const LookupIds& ids, const TableFeature& feature, std::int64_t begin,
                           std::int64_t end, float* output);
  void (*weight_gradient)(const LookupIds& ids, const TableFeature& feature, bool is_sequence,
                          std::int64_t begin, std::int64_t end, const float* gradient,
                          float* output);
};

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
const TableLookupKernels* table_lookup_kernels(Isa isa) noexcept;
/// The versions for the instruction set of this process.
const TableLookupKernels& table_lookup_kernels() noexcept;
/// The plain loops that judge the others.
const TableLookupKernels& table_lookup_reference() noexcept;

}  // namespace tessera::kernels
