// tessera/checkpoint/convert.h — checkpoints into other checkpoints and plain files. No LibTorch.
//
// Everything streams: no tensor is ever whole in memory.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/reader.h"
#include "tessera/checkpoint/writer.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

/// How tensors are cut over the files of the ranks.
enum class Cut : std::uint8_t {
  kWhole,    // not at all; each goes to the rank that has least so far
  kRows,     // evenly along the first dimension
  kColumns,  // evenly along the last dimension of those with two or more, the others as kRows
};

/// Parts of every tensor of `source` for `ranks` ranks. `source` must outlive them.
TESSERA_API std::vector<std::vector<Part>> parts_of(const TensorSource& source, int ranks, Cut cut);

/// Writes all tensors, whole, into one safetensors file. The file appears when it is complete, and
/// replaces an older one in one step.
TESSERA_API void export_plain(const Reader& source, const std::string& path,
                              Disk& disk = Disk::real());

/// Saves plain safetensors files (one, or a folder of them) as a checkpoint. One of the same step
/// that another job saved stays, with Error(kInvalid), unless it is to be replaced.
TESSERA_API Manifest import_plain(const std::string& path, const std::string& root,
                                  std::int64_t step, Disk& disk = Disk::real(),
                                  bool replaces = false);

/// Saves `source` under another root, cut for another number of ranks. Values come along; those of
/// single ranks only if the number of ranks stays. Replaces as import_plain does.
TESSERA_API Manifest reshard(const Reader& source, const std::string& root, int ranks, Cut cut,
                             Disk& disk = Disk::real(), bool replaces = false);

/// A part of a tensor, for the file of a rank.
struct PlacedRegion {
  Region region;
  int rank = 0;
};

/// The same, cut as `places` says: the parts of some tensors, by name. The others stay whole, each
/// with the rank that has least. Throws Error(kInvalid), naming the tensor, if parts are of a
/// tensor that is not there, of no rank, or do not cover it once.
TESSERA_API Manifest reshard(const Reader& source, const std::string& root, int ranks,
                             const std::map<std::string, std::vector<PlacedRegion>>& places,
                             Disk& disk = Disk::real(), bool replaces = false);

/// Replaces the delta of `step` by the whole it stands for. Throws Error(kInvalid) if it is none,
/// or if a newer delta stands on it (compact that one instead).
TESSERA_API Manifest compact(const std::string& root, std::int64_t step, Disk& disk = Disk::real());

}  // namespace tessera::checkpoint
