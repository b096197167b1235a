// tessera/collision/row_init.h — the first values of a row, from its id alone.
//
// Philox 4x32 with ten rounds: the key is the table's seed, the counter the id and the number of
// the block of four columns. Row numbers, ranks and order play no part, so any world size begins
// with the same model.

#pragma once

#include <cstdint>
#include <span>

#include "tessera/core/export.h"

namespace tessera::collision {

/// Writes `columns` uniform numbers of [low, high) for every id, id by id. Throws
/// std::invalid_argument if `values` has another size.
TESSERA_API void init_rows(std::span<const std::int64_t> ids, std::uint64_t seed,
                           std::int64_t columns, float low, float high, std::span<float> values);

}  // namespace tessera::collision
