// src/comm/gloo/pair_proofs.h — the pairs of a Gloo group prove to each other that they know the
// job's secret.
//
// Gloo takes whoever connects for the rank that it waits for. So before the first operation both
// ends of every pair send what only a rank of the job can know, over that pair. Whoever has taken a
// rank's place is found then. This is no protection of what is sent later: that is the network's.

#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/secret.h"

namespace tessera::comm {

/// Collective over the group of `gloo`, before its first operation. `store` is the group's own.
/// Throws Error(kRendezvous) that names the rank whose place is taken, and what Gloo throws if a
/// peer is lost or says nothing within `limit`.
void prove_pairs(c10d::Backend& gloo, c10d::Store& store, const core::Secret& secret,
                 std::chrono::milliseconds limit);

}  // namespace tessera::comm
