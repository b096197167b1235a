#include "tessera/collision/row_init.h"

#include <array>
#include <stdexcept>
#include <string>

namespace tessera::collision {
namespace {

using Block = std::array<std::uint32_t, 4>;

/// Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (2011).
Block philox(Block counter, std::uint64_t key) {
  constexpr std::uint64_t kFirst = 0xD2511F53U;
  constexpr std::uint64_t kSecond = 0xCD9E8D57U;
  auto low = static_cast<std::uint32_t>(key);
  auto high = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = kFirst * counter[0];
    const std::uint64_t b = kSecond * counter[2];
    counter = {
        static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ low, static_cast<std::uint32_t>(b),
        static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ high, static_cast<std::uint32_t>(a)};
    low += 0x9E3779B9U;
    high += 0xBB67AE85U;
  }
  return counter;
}

}  // namespace

void init_rows(std::span<const std::int64_t> ids, std::uint64_t seed, std::int64_t columns,
               float low, float high, std::span<float> values) {
  if (columns < 0 || values.size() != ids.size() * static_cast<std::size_t>(columns)) {
    throw std::invalid_argument("init_rows: " + std::to_string(ids.size()) + " rows of " +
                                std::to_string(columns) + " columns, but room for " +
                                std::to_string(values.size()) + " numbers.");
  }
  float* value = values.data();
  for (const std::int64_t id : ids) {
    const auto bits = static_cast<std::uint64_t>(id);
    for (std::int64_t column = 0; column < columns; column += 4) {
      const Block block =
          philox({static_cast<std::uint32_t>(bits), static_cast<std::uint32_t>(bits >> 32),
                  static_cast<std::uint32_t>(column / 4), 0},
                 seed);
      for (std::int64_t i = column; i < columns && i < column + 4; ++i) {
        // 24 bits, as many as a float holds: never rounded up to `high` before it is scaled.
        const float unit =
            static_cast<float>(block[static_cast<std::size_t>(i - column)] >> 8) * 0x1p-24F;
        *value++ = low + unit * (high - low);
      }
    }
  }
}

}  // namespace tessera::collision
