#include "data/schema.h"

#ifdef TESSERA_HAS_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

namespace tessera::workloads::data {

std::int64_t raw_id(std::string_view text) {
#ifdef TESSERA_HAS_XXHASH
  return static_cast<std::int64_t>(XXH3_64bits(text.data(), text.size()));
#else
  static_cast<void>(text);
  throw DataError(
      "ids: this program was built without xxHash, which makes ids of texts. Install libxxhash-dev "
      "and build it again.");
#endif
}

}  // namespace tessera::workloads::data
