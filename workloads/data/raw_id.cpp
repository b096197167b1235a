#include "data/schema.h"

#ifdef TESSERA_HAS_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

namespace tessera::workloads::data {

#ifdef TESSERA_HAS_XXHASH

std::int64_t raw_id(std::string_view text) {
  return static_cast<std::int64_t>(XXH3_64bits(text.data(), text.size()));
}

std::uint32_t check_hash(std::string_view text) {
  // Of another family: what XXH3 mixes alike, this does not.
  constexpr std::uint32_t kSeed = 0x9e3779b9U;
  return XXH32(text.data(), text.size(), kSeed);
}

#else

std::int64_t raw_id(std::string_view /*text*/) {
  throw DataError(
      "ids: this program was built without xxHash, which makes ids of texts. Install libxxhash-dev "
      "and build it again.");
}

std::uint32_t check_hash(std::string_view text) {
  raw_id(text);
  return 0;
}

#endif

}  // namespace tessera::workloads::data
