// src/kernels/row_init.h — the first values of rows, from their ids alone.
//
// Meaning, for number c of the row of an id:
//
//   x = number c % 4 of philox(counter = {id's lower half, its upper half, c / 4, 0}, key = seed)
//   value = low + (x >> 8) * 2^-24 * (high - low)
//
// Philox 4x32 with ten rounds: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1,
// 2, 3 (2011). Products are rounded before they are added, so that all levels give the same bits.

#pragma once

#include <array>
#include <cstdint>

#include "kernels/dispatch.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kPhiloxFirst = 0xD2511F53U;
inline constexpr std::uint32_t kPhiloxSecond = 0xCD9E8D57U;
inline constexpr std::uint32_t kPhiloxLow = 0x9E3779B9U;
inline constexpr std::uint32_t kPhiloxHigh = 0xBB67AE85U;
inline constexpr int kPhiloxRounds = 10;

struct RowInitKernels {
  /// `count` rows of `columns` numbers, one behind the other.
  void (*init_rows)(const std::int64_t* ids, std::int64_t count, std::uint64_t seed,
                    std::int64_t columns, float low, float high, float* values);
};

/// The versions for `isa`; null if this build does not have them. The CPU must support `isa`.
const RowInitKernels* row_init_kernels(Isa isa) noexcept;
/// The versions for the instruction set of this process.
const RowInitKernels& row_init_kernels() noexcept;
/// The plain loops that judge the others.
const RowInitKernels& row_init_reference() noexcept;

}  // namespace tessera::kernels
