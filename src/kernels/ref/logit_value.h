// src/kernels/ref/logit_value.h — reads and writes one logit of any type, plainly.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/reduce.h"

namespace tessera::kernels::ref {

inline double half_value(std::uint16_t bits) {
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

inline double brain_value(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

inline double read(Element element, const void* array, std::int64_t i) {
  if (element == Element::kFloat32) return static_cast<const float*>(array)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(array)[i];
  return element == Element::kFloat16 ? half_value(bits) : brain_value(bits);
}

/// The 16-bit pattern nearest to `value`, found by bisection: patterns of one sign are ordered as
/// their values are. Ties go to the even pattern.
inline std::uint16_t nearest_pattern(double value, double (*value_of)(std::uint16_t),
                                     std::uint16_t infinity) {
  if (std::isnan(value)) return infinity | 1U;
  const std::uint16_t sign = std::signbit(value) ? 0x8000U : 0U;
  const double magnitude = std::fabs(value);
  std::uint16_t low = 0;
  std::uint16_t high = infinity;
  while (high - low > 1) {
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (value_of(middle) <= magnitude ? low : high) = middle;
  }
  if (magnitude == std::numeric_limits<double>::infinity()) return sign | infinity;
  // Past the largest number the next step of the grid stands for infinity.
  const double below = value_of(low);
  const double above = high == infinity ? 2 * below - value_of(low - 1) : value_of(high);
  const bool up = magnitude - below > above - magnitude ||
                  (magnitude - below == above - magnitude && (low & 1U) != 0);
  return sign | (up ? high : low);
}

inline void write(Element element, void* array, std::int64_t i, double value) {
  if (element == Element::kFloat32) {
    static_cast<float*>(array)[i] = static_cast<float>(value);
  } else if (element == Element::kFloat16) {
    static_cast<std::uint16_t*>(array)[i] = nearest_pattern(value, half_value, 0x7C00);
  } else {
    static_cast<std::uint16_t*>(array)[i] = nearest_pattern(value, brain_value, 0x7F80);
  }
}

}  // namespace tessera::kernels::ref
