// tessera/comm/backend.h — the engine of a group by itself, for process groups made elsewhere.

#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::comm {

/// Makes the engine of one rank of a group that meets on `store`, without a process group around
/// it. `init_process_group("shm")` in Python ends here.
///
/// Collective over the group; throws as make_group does. Falls back to Gloo, with a warning on rank
/// 0, when shared memory cannot be had and `options.engine` is kAuto.
TESSERA_API c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const GroupOptions& options = default_group_options());

}  // namespace tessera::comm
