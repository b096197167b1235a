// dlrm/click_layout.h — where things lie in a block of a binary click log. Private to click_file.
//
// A block of n samples: labels (uint8), dense (float32 or float16, sample by sample), then feature
// by feature: for varying bags n + 1 offsets (uint32), then the ids (uint32, or uint64 for tables
// of more than 2^32 rows and those that grow). Every part begins at a multiple of 8.

#pragma once

#include <cstdint>
#include <string>

#include "dlrm/click_file.h"

namespace tessera::workloads::dlrm::detail {

constexpr std::uint64_t kHeaderBytes = 64;
constexpr std::uint64_t kBlockAlignment = 64;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t step) {
  return (value + step - 1) / step * step;
}

inline std::uint64_t id_bytes(const Feature& feature) {
  return feature.grows() || feature.num_rows > (std::int64_t{1} << 32) ? 8 : 4;
}

/// What a file may hold at most; everything beyond is refused, so that no product overflows.
constexpr std::uint64_t kMaxDense = 1U << 20;
constexpr std::uint64_t kMaxFeatures = 1U << 16;
constexpr std::uint64_t kMaxNameBytes = 1U << 10;
constexpr std::uint64_t kMaxOriginBytes = 1U << 26;
constexpr std::uint64_t kMaxBag = 1U << 20;
constexpr std::uint64_t kMaxBlockSamples = 1U << 24;
constexpr std::int64_t kMaxRows = std::int64_t{1} << 48;
constexpr std::int64_t kMaxDim = 4096;

/// Throws DataError beginning with `name` for a schema that cannot be stored.
void check_schema(const ClickSchema& schema, const std::string& name);

/// Bytes of a block of n samples if all bags were empty or of fixed size: exact without varying
/// bags, the least otherwise.
std::uint64_t least_block_bytes(const ClickSchema& schema, bool half_dense, std::uint64_t n);

/// The version of the format that holds all of it.
std::uint32_t version_of(const ClickSchema& schema);

/// Header and directory of a file whose directory begins at `directory_begin`.
struct EncodedLayout {
  std::string header;
  std::string directory;
};
EncodedLayout encode_layout(const ClickFileLayout& layout, std::uint64_t directory_begin);

}  // namespace tessera::workloads::dlrm::detail
