#include "tessera/checkpoint/checksum.h"

#include "core/sha256.h"

namespace tessera::checkpoint {

std::string sha256(std::string_view bytes) {
  return core::hex_of(core::bytes_of(core::sha256(bytes)));
}

}  // namespace tessera::checkpoint
