// src/comm/lending.h — large tensors for other ranks that nobody copies.
//
// On one host, ranks can read each other's memory. What one makes for another in memory from
// `lendable` is told, not sent: the other gets a tensor that lies with the one who made it.
// Exported for the tests alone.

#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/awaitable.h"
#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::comm {

/// Whether the group's ranks can reach each other's memory; the same answer on all ranks.
TESSERA_API bool can_lend(const Group& group);

/// An uninitialised flat tensor of host memory, in memory to be lent where there is some left. Not
/// collective.
TESSERA_API at::Tensor lendable(std::int64_t size, at::ScalarType dtype, const Group& group);

/// inputs[r] is for rank r; counts[r] elements come from it: flat host tensors of one type, the
/// same on all ranks. This rank's own part stays undefined. Collective; for groups that can lend.
///
/// The inputs must not change any more, ever: the others may read them when this rank has gone on.
/// What comes must not be written. If an input of some rank is not from `lendable`, all are copied.
/// Throws comm::Error, the same on all ranks, if the counts do not fit.
TESSERA_API Awaitable<std::vector<at::Tensor>> lend_async(std::vector<at::Tensor> inputs,
                                                          std::vector<std::int64_t> counts,
                                                          const Group& group);

}  // namespace tessera::comm
