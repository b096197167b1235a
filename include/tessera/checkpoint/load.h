// tessera/checkpoint/load.h — reads a checkpoint into the state of any number of ranks.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/disk.h"
#include "tessera/checkpoint/state.h"
#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

struct LoadOptions {
  /// This step and no other; without it, the newest that is whole.
  std::optional<std::int64_t> step;
  /// Up to so many bytes a rank reads into memory of its own first, and copies when every rank has
  /// all of its own. Beyond, it checks everything first and then reads it again, in place.
  std::int64_t staging_bytes = std::int64_t{1} << 30;
  /// Where to read; the machine's own if null.
  Disk* disk = nullptr;
  /// Gets warnings, on rank 0. Default: standard error.
  std::function<void(const std::string&)> log;
};

struct LoadReport {
  std::int64_t step = 0;
  std::string folder;
  int saved_world = 1;
  Values values;
  Values rank_values;                 // those that the rank of this number saved, if there was one
  std::vector<std::string> warnings;  // what is wrong with newer checkpoints
};

/// Loads the newest checkpoint of `root` into the tensors of `state`, wherever their parts lie.
///
/// Collective over `group`; all ranks load the same checkpoint: one that any rank cannot read is
/// left out on all, with a warning. Every sum is checked. Each rank reads only what it holds.
/// Tensors of the checkpoint that `state` does not name are left alone. Throws Error(kMissing) if
/// there is no whole checkpoint or it lacks a tensor, Error(kInvalid) if one has another shape or
/// type, Error(kRead) if a rank cannot read for now. After an exception the state is what it was
/// before: nothing is overwritten until every rank has checked all that it takes. Only if reading
/// fails after that, of more than `staging_bytes`, tensors are undefined, and the text says so.
TESSERA_API LoadReport load(const std::string& root, State& state,
                            const std::optional<comm::Group>& group = std::nullopt,
                            const LoadOptions& options = {});

/// Reads one whole tensor into memory. Not collective.
TESSERA_API at::Tensor read_tensor(const TensorSource& source, const TensorInfo& tensor);

}  // namespace tessera::checkpoint
