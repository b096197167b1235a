// src/checkpoint/stored_region.h — the bytes of a stored region, checked, and those of a wanted
// one.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/open_file.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint {

/// Throws Error if `region` leaves the tensor.
void check_region(const TensorInfo& tensor, const Region& region);

/// Hands the bytes of a stored region to a reader, a chunk at a time, each checked once before use.
class Chunks {
 public:
  Chunks(const OpenFile& file, const RegionRecord& record, const std::string& tensor)
      : file_(file), record_(record), tensor_(tensor), num_bytes_(record.end - record.begin) {}

  /// Copies bytes [begin, begin + count) of the region; calls come with ascending `begin`.
  void copy(std::uint64_t begin, std::uint64_t count, std::byte* target);

  /// Compares one chunk with its sum and keeps nothing: the bytes pass through `buffer`, which
  /// stays in the cache. Returns how many there were.
  std::uint64_t check(std::uint64_t chunk, std::vector<std::byte>& buffer);

 private:
  void load(std::uint64_t chunk, std::uint64_t first, std::uint64_t last, std::byte* target);
  void expect(std::uint64_t place);
  void compare(std::uint64_t chunk, std::uint64_t first, std::uint64_t last, std::uint32_t sum);

  const OpenFile& file_;
  const RegionRecord& record_;
  const std::string& tensor_;
  std::uint64_t num_bytes_;
  std::uint64_t held_ = UINT64_MAX;
  std::uint64_t expected_ = 0;  // end of what the kernel was told to fetch
  std::vector<std::byte> buffer_;
};

/// Copies to `data`, which holds the wanted region, what the stored one has of it.
void copy_common(const RegionRecord& record, const Region& wanted, std::uint64_t element_bytes,
                 Chunks& chunks, std::byte* data);

}  // namespace tessera::checkpoint
