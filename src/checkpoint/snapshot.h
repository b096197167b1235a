// checkpoint/snapshot.h — the tensors of one rank as bytes in host memory, ready to be written.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/writer.h"

namespace tessera::checkpoint {

/// Memory of earlier snapshots, by name, to be written again: fresh memory costs a fault per page.
using Staging = std::map<std::string, at::Tensor>;

struct Snapshot {
  std::vector<Part> parts;
  std::vector<DeltaRecord> deltas;
  std::vector<ListDelta> lists;
  std::vector<at::Tensor> memory;  // what the parts point to
  Values values;
  Values rank_values;
};

/// Takes what rank `rank` of `size` writes. Without `staging`, parts point to the tensors
/// themselves where they can; with it, everything is copied. Throws ValueError naming a tensor
/// whose pieces leave it, or that differs in type.
Snapshot take_snapshot(const State& state, int rank, int size, bool is_delta, Staging* staging);

/// Writes a snapshot. Collective over `group`.
SaveReport write_snapshot(const std::string& root, std::int64_t step, const Snapshot& snapshot,
                          const std::optional<comm::Group>& group, const SaveOptions& options);

}  // namespace tessera::checkpoint
