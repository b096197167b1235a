// src/serving/text_id.h — texts as ids of 64 bits, as training makes them at its door.

#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::serving {

/// XXH3 of its bytes, with seed 0. Throws std::runtime_error in a build without xxHash.
std::int64_t text_id(std::string_view text);
bool has_text_ids() noexcept;

}  // namespace tessera::serving
