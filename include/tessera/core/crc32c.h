// tessera/core/crc32c.h — the sum that files of ours carry. No LibTorch.
//
// CRC-32C (Castagnoli, polynomial 0x1EDC6F41 reflected, initial value and final xor 0xFFFFFFFF; the
// sum of "123456789" is e3069283), as in iSCSI, ext4 and SSE 4.2.

#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/core/export.h"

namespace tessera::core {

/// Returns the CRC-32C of the bytes that gave `before`, followed by these. Start with 0.
TESSERA_API std::uint32_t crc32c(const void* data, std::size_t num_bytes, std::uint32_t before = 0);

/// Returns the CRC-32C of two pieces in a row, given the sum of each and the bytes of the second.
TESSERA_API std::uint32_t crc32c_joined(std::uint32_t first, std::uint32_t second,
                                        std::uint64_t second_bytes);

/// As crc32c, by tables instead of the instruction: the judge of the fast one.
TESSERA_API std::uint32_t crc32c_by_table(const void* data, std::size_t num_bytes,
                                          std::uint32_t before = 0);

}  // namespace tessera::core
