// dlrm/half.h — 16-bit floating point numbers (IEEE binary16) in plain integers.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera::workloads::dlrm {

/// The largest magnitude that still rounds to a finite half is just below this.
inline constexpr float kHalfLimit = 65520.0F;

/// Rounds to nearest, ties to even. `value` is finite and its magnitude below kHalfLimit.
inline std::uint16_t half_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude < 113U << 23) {  // below 2^-14: half's subnormal numbers
    // The last place of 0.5 is the unit of the subnormal numbers: the addition rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
  }
  const std::uint32_t rounded = magnitude + 0xfffU + (magnitude >> 13 & 1U);
  return static_cast<std::uint16_t>(sign | (rounded - (112U << 23)) >> 13);
}

/// Exact. `half` is finite.
inline float float_of(std::uint16_t half) {
  const float magnitude = std::bit_cast<float>((half & 0x7fffU) << 13) * 0x1p112F;
  return (half & 0x8000U) != 0 ? -magnitude : magnitude;
}

}  // namespace tessera::workloads::dlrm
