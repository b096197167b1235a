// tessera/data_parallel/deterministic.h — the same bits whatever the size of the buckets.

#pragma once

#include <memory>

#include "tessera/core/export.h"
#include "tessera/data_parallel/comm_hook.h"

namespace tessera::data_parallel {

/// Adds the gradients in rank order, each element by itself, and then divides. The average depends
/// on the ranks' gradients only: not on how they are cut into buckets, nor on the engine.
///
/// On shared memory this is an ordinary all-reduce. Other engines add in an order of their own, so
/// every rank gathers all gradients there: (size - 1) times the bytes.
TESSERA_API std::shared_ptr<CommHook> deterministic_hook();

}  // namespace tessera::data_parallel
