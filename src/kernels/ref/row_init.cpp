// The meaning of kernels/row_init.h as plain loops: slow, obvious, and the judge of the others.

#include "kernels/row_init.h"

namespace tessera::kernels {
namespace {

using Block = std::array<std::uint32_t, 4>;

Block philox(Block counter, std::uint64_t key) {
  auto low = static_cast<std::uint32_t>(key);
  auto high = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t a = std::uint64_t{kPhiloxFirst} * counter[0];
    const std::uint64_t b = std::uint64_t{kPhiloxSecond} * counter[2];
    counter = {
        static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ low, static_cast<std::uint32_t>(b),
        static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ high, static_cast<std::uint32_t>(a)};
    low += kPhiloxLow;
    high += kPhiloxHigh;
  }
  return counter;
}

void init_rows(const std::int64_t* ids, std::int64_t count, std::uint64_t seed,
               std::int64_t columns, float low, float high, float* values) {
  const float range = high - low;
  for (std::int64_t row = 0; row < count; ++row) {
    const auto id = static_cast<std::uint64_t>(ids[row]);
    for (std::int64_t column = 0; column < columns; column += 4) {
      const Block block =
          philox({static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(id >> 32),
                  static_cast<std::uint32_t>(column / 4), 0},
                 seed);
      for (std::int64_t i = column; i < columns && i < column + 4; ++i) {
        // 24 bits, as many as a float holds: never rounded up to `high` before it is scaled.
        const float unit =
            static_cast<float>(block[static_cast<std::size_t>(i - column)] >> 8) * 0x1p-24F;
        *values++ = low + unit * range;
      }
    }
  }
}

}  // namespace

const RowInitKernels& row_init_reference() noexcept {
  static constexpr RowInitKernels kKernels{init_rows};
  return kKernels;
}

}  // namespace tessera::kernels
