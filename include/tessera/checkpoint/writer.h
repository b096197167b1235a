// tessera/checkpoint/writer.h — writes one rank's share of a checkpoint. No LibTorch.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/disk.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

/// A region of a tensor and its bytes, row-major without gaps.
struct TESSERA_API Part {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape;  // of the whole tensor
  Region region;
  const std::byte* data = nullptr;  // in memory; or, if null:
  /// Fills `out` with the region's bytes from `begin` on. Called in order.
  std::function<void(std::uint64_t begin, std::span<std::byte> out)> fill;

  std::uint64_t num_bytes() const;
};

/// Writes the parts of rank `rank` into `folder` and returns what was written: one safetensors
/// file, or more if several regions of one tensor are among the parts. Files are synced. Nothing is
/// written without parts. `progress` gets the bytes written so far. Throws Error(kWrite).
TESSERA_API Manifest write_shard(const std::string& folder, int rank, int world,
                                 const std::vector<Part>& parts, Disk& disk = Disk::real(),
                                 const std::function<void(std::uint64_t)>& progress = nullptr);

/// Saves from one process: everything between PendingFolder and commit. `parts[r]` go into the file
/// of rank r. Returns the manifest.
TESSERA_API Manifest save_parts(const std::string& root, std::int64_t step,
                                const std::vector<std::vector<Part>>& parts, const Values& values,
                                int keep = 0, Disk& disk = Disk::real(), bool replaces = false);

}  // namespace tessera::checkpoint
