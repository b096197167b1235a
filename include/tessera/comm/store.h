// tessera/comm/store.h — where the ranks of a job meet before there is a group.

#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/comm/environment.h"
#include "tessera/core/export.h"

namespace tessera::comm {

/// Connects to the store of the job `environment` describes; rank 0 hosts it unless the launcher
/// does, and then listens on MASTER_ADDR alone. In a job with a secret (TESSERA_JOB_SECRET_FILE or
/// TESSERA_JOB_SECRET; `tessera run` gives every job one) the store asks for it; under torchrun,
/// whose agent has a store that does not, rank 0 hosts it beside. Without a secret the store is
/// LibTorch's own: see check_open_store. Keys of other jobs and attempts on the same store are not
/// seen. A process without a launcher gets a store of its own.
///
/// Not collective, but waits for the store to come up. Throws Error(kRendezvous) naming address and
/// port if it does not within `timeout`, if the port is in use, or if the store has another secret;
/// ValueError if the secret cannot be used, or there is none and MASTER_ADDR is a public address.
TESSERA_API c10::intrusive_ptr<c10d::Store> connect_store(const Environment& environment,
                                                          std::chrono::milliseconds timeout);

/// To be called before a store that asks for nothing is used at MASTER_ADDR. Rank 0 prints one
/// warning in the life of the process. Throws ValueError if the address is neither of this host
/// alone nor of a private network, unless TESSERA_INSECURE_NO_AUTH is 1. Not collective.
TESSERA_API void check_open_store(const Environment& environment);

}  // namespace tessera::comm
