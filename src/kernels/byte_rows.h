// src/kernels/byte_rows.h — rows of numbers as bytes, with a scale and a zero point, and back.
//
//   range:  low = the least of 0 and the values, high = the largest; both NaN if a value is
//   pack:   bytes[i] = round(values[i] / scale) + zero, kept within 0 .. 255; halves go to even
//   add:    sum[i] += (bytes[i] - zero) * scale
//
// and as signed bytes with a scale alone, where what rounding loses is kept:
//
//   carry:        sum[i] = values[i] + before[i]; returns the largest magnitude, NaN if one is NaN
//   pack_signed:  bytes[i] = round(values[i] / scale), kept within -127 .. 127; halves go to even;
//                 values[i] -= bytes[i] * scale
//   add_signed:   sum[i] += bytes[i] * scale

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"

namespace tessera::kernels {

struct ByteRowKernels {
  void (*range)(const float* values, std::int64_t count, float* low, float* high);
  void (*pack)(const float* values, std::int64_t count, float scale, float zero,
               std::uint8_t* bytes);
  void (*add)(const std::uint8_t* bytes, std::int64_t count, float scale, float zero, float* sum);
  /// `before` may be null, for zeros, or `sum` itself.
  float (*carry)(const float* values, const float* before, std::int64_t count, float* sum);
  void (*pack_signed)(float* values, std::int64_t count, float scale, std::int8_t* bytes);
  void (*add_signed)(const std::int8_t* bytes, std::int64_t count, float scale, float* sum);
};

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
const ByteRowKernels* byte_row_kernels(Isa isa) noexcept;
/// The versions for the instruction set of this process.
const ByteRowKernels& byte_row_kernels() noexcept;
/// The plain loops that judge the others.
const ByteRowKernels& byte_row_reference() noexcept;

}  // namespace tessera::kernels
