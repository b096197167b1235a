// src/kernels/byte_rows.h — rows of numbers as bytes, with a scale and a zero point, and back.
//
//   range:  low = the least of 0 and the values, high = the largest; both NaN if a value is
//   pack:   bytes[i] = round(values[i] / scale) + zero, kept within 0 .. 255; halves go to even
//   add:    sum[i] += (bytes[i] - zero) * scale

#pragma once

#include <cstdint>

#include "kernels/dispatch.h"

namespace tessera::kernels {

struct ByteRowKernels {
  void (*range)(const float* values, std::int64_t count, float* low, float* high);
  void (*pack)(const float* values, std::int64_t count, float scale, float zero,
               std::uint8_t* bytes);
  void (*add)(const std::uint8_t* bytes, std::int64_t count, float scale, float zero, float* sum);
};

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
const ByteRowKernels* byte_row_kernels(Isa isa) noexcept;
/// The versions for the instruction set of this process.
const ByteRowKernels& byte_row_kernels() noexcept;
/// The plain loops that judge the others.
const ByteRowKernels& byte_row_reference() noexcept;

}  // namespace tessera::kernels
