// tessera/collision/id_policy.h — admission and eviction in words, as flags and files have them. No
// LibTorch.

#pragma once

#include <string>
#include <string_view>

#include "tessera/collision/id_table.h"
#include "tessera/core/export.h"

namespace tessera::collision {

/// `always`, `freq:N` (from the n-th sighting on) or `prob:P`. Throws std::invalid_argument for
/// another text, saying which there are.
TESSERA_API Admission admission_of(std::string_view text);
/// `none`, `lfu`, `lru`, `distance-lfu` or `ttl:N` (steps). Throws std::invalid_argument.
TESSERA_API Eviction eviction_of(std::string_view text);

}  // namespace tessera::collision
