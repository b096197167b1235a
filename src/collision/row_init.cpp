#include "tessera/collision/row_init.h"

#include <stdexcept>
#include <string>

#include "kernels/row_init.h"

namespace tessera::collision {

void init_rows(std::span<const std::int64_t> ids, std::uint64_t seed, std::int64_t columns,
               float low, float high, std::span<float> values) {
  if (columns < 0 || values.size() != ids.size() * static_cast<std::size_t>(columns)) {
    throw std::invalid_argument("init_rows: " + std::to_string(ids.size()) + " rows of " +
                                std::to_string(columns) + " columns, but room for " +
                                std::to_string(values.size()) + " numbers.");
  }
  kernels::row_init_kernels().init_rows(ids.data(), static_cast<std::int64_t>(ids.size()), seed,
                                        columns, low, high, values.data());
}

}  // namespace tessera::collision
