// data/logarithm.h — log(1 + x), the same bits for one number and for many, on every machine. No
// LibTorch.

#pragma once

#include <bit>
#include <cstdint>

namespace tessera::workloads::data {

/// log(1 + x) of a finite number, to a few units in the last place of 64 bits; 0 for x <= 0. There
/// is neither a branch nor a table in it, so that compilers do several at once. What includes it is
/// compiled without fused multiply-adds.
inline double logarithm(double x) noexcept {
  const double u = 1 + x;
  // What rounding took from u, where it shows.
  const double lost = x < 1 ? x - (u - 1) : 0;
  // u = 2^k m, m from sqrt(1/2) to sqrt(2).
  constexpr auto kRootOfHalf = std::bit_cast<std::uint64_t>(0x1.6a09e667f3bcdp-1);
  const auto bits = std::bit_cast<std::uint64_t>(u);
  const std::uint64_t k = (bits - kRootOfHalf) >> 52U;
  const double power = std::bit_cast<double>(k | std::bit_cast<std::uint64_t>(0x1p52)) - 0x1p52;
  const double f = std::bit_cast<double>(bits - (k << 52U)) - 1;
  // log(1 + f) = 2 atanh(s) = s (2 + z p(z)), s = f / (2 + f), z = s^2. The polynomial meets it at
  // Chebyshev's points of 0 <= z <= 0.02944 and is nowhere further off than 4e-16.
  const double s = f / (2 + f);
  const double z = s * s;
  double p = 0x1.2b5900de53b32p-3;
  p = p * z + 0x1.39fe51a7c18f9p-3;
  p = p * z + 0x1.7462b51cb66b1p-3;
  p = p * z + 0x1.c71c62e3f11e6p-3;
  p = p * z + 0x1.2492492df281ap-2;
  p = p * z + 0x1.99999999952d7p-2;
  p = p * z + 0x1.5555555555558p-1;
  const double value = power * 0x1.62e42fefa39efp-1 + (s * (2 + z * p) + lost);
  return x > 0 ? value : 0;
}

}  // namespace tessera::workloads::data
