// src/kernels/quantised_rows.h — rows of embedding tables in few bits, and lookups in them.
//
// A row of `num_columns` numbers, by type:
//
//   float32, float16, bfloat16   the numbers
//   int8, int4, int2             float16 scale, float16 bias, codes; the earliest code of a byte
//   lies
//                                lowest
//   float8                       float16 scale, two bytes that are 0, codes in e4m3 (no infinities)
//
//   quantise, b bits:  bias = half(least); scale = half((largest - bias) / (2^b - 1)), or 1 where
//                      that is 0 or has no finite inverse; code = (x - bias) * (1 / scale), halves
//                      to even, kept within 0 .. 2^b - 1
//   quantise, float8:  scale = half(largest magnitude / 448), or 1 as above; code = x * (1 / scale)
//                      to the nearest, at most 448
//   dequantise:        code * scale + bias
//   pooled:            sum over the positions of a bag of weight * code * scale, plus the sum of
//                      weight * bias, both in the order of positions; over the number of ids if
//                      mean
//   sequence:          weight * scale * code + weight * bias, per position
//
// Products are rounded before they are added, so that all levels give the same bits.

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"

namespace tessera::kernels {

enum class RowType : std::uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt8,
  kInt4,
  kInt2,
  kFloat8,
};

/// What happened to a row; several may be set.
enum RowFault : std::uint8_t {
  kRowFine = 0,
  kRowNan = 1,        // a number is NaN; its code is 0
  kRowOverflow = 2,   // a number, the scale or the bias is infinite in the row's type
  kRowTinyRange = 4,  // the numbers differ, by less than a float16 scale can say: all became alike
};

struct QuantisedRows {
  RowType type = RowType::kFloat32;
  const std::uint8_t* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
  std::int64_t row_bytes = 0;  // from one row to the next
};

/// The bags of one feature: bag b owns the positions offsets[b] to offsets[b + 1] - 1 of ids.
struct QuantisedBags {
  const std::int64_t* ids = nullptr;
  const std::int64_t* offsets = nullptr;
  const float* weights = nullptr;  // one per position; null: all 1
  std::int64_t num_bags = 0;
  bool is_mean = false;
};

struct QuantisedRowKernels {
  /// Returns RowFault bits. Bytes of the row behind its codes are left alone.
  std::uint8_t (*quantise)(RowType type, const float* values, std::int64_t num_columns,
                           std::uint8_t* row);
  void (*dequantise)(RowType type, const std::uint8_t* row, std::int64_t num_columns,
                     float* values);
  /// output[b * stride + c]. Both return the first position whose id is not a row, or -1; ids
  /// behind it are not looked at, and what is written is then of no use.
  std::int64_t (*pooled)(const QuantisedRows& rows, const QuantisedBags& bags, float* output,
                         std::int64_t stride);
  /// output[(k - offsets[0]) * stride + c].
  std::int64_t (*sequence)(const QuantisedRows& rows, const QuantisedBags& bags, float* output,
                           std::int64_t stride);
};

/// Bytes of a row's codes or numbers, and of what stands in front of them.
std::int64_t code_bytes(RowType type, std::int64_t num_columns) noexcept;
std::int64_t head_bytes(RowType type) noexcept;

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
const QuantisedRowKernels* quantised_row_kernels(Isa isa) noexcept;
/// The versions for the instruction set of this process.
const QuantisedRowKernels& quantised_row_kernels() noexcept;
/// The plain loops that judge the others.
const QuantisedRowKernels& quantised_row_reference() noexcept;

}  // namespace tessera::kernels
