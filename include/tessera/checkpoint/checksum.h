// tessera/checkpoint/checksum.h — the two standard sums a checkpoint carries. No LibTorch.
//
// Data: CRC-32C. Manifests: SHA-256 (FIPS 180-4), because a delta names its base by it.

#pragma once

#include <string>
#include <string_view>

#include "tessera/core/crc32c.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

using core::crc32c;
using core::crc32c_by_table;
using core::crc32c_joined;

/// Returns the SHA-256 of `bytes` as 64 hexadecimal digits.
TESSERA_API std::string sha256(std::string_view bytes);

}  // namespace tessera::checkpoint
