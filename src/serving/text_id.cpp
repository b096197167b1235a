#include "serving/text_id.h"

#include <stdexcept>

#ifdef TESSERA_HAS_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

namespace tessera::serving {

#ifdef TESSERA_HAS_XXHASH
bool has_text_ids() noexcept { return true; }

std::int64_t text_id(std::string_view text) {
  return static_cast<std::int64_t>(XXH3_64bits(text.data(), text.size()));
}
#else
bool has_text_ids() noexcept { return false; }

std::int64_t text_id(std::string_view) {
  throw std::runtime_error("serving: built without xxHash, which makes ids of texts");
}
#endif

}  // namespace tessera::serving
