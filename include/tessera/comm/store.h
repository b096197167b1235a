// tessera/comm/store.h — where the ranks of a job meet before there is a group.

#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/comm/environment.h"
#include "tessera/core/export.h"

namespace tessera::comm {

/// Connects to the store of the job `environment` describes; rank 0 hosts it unless the launcher
/// does, and then listens on MASTER_ADDR alone. In a job with a secret (TESSERA_JOB_SECRET_FILE or
/// TESSERA_JOB_SECRET; `tessera run` gives every job one) the store asks for it. Without one, and
/// under torchrun, it is LibTorch's own, which asks for nothing; rank 0 then prints a warning. Keys
/// of other jobs and attempts on the same store are not seen. A process without a launcher gets a
/// store of its own.
///
/// Not collective, but waits for the store to come up. Throws Error(kRendezvous) naming address and
/// port if it does not within `timeout`, if the port is in use, or if the store has another secret;
/// ValueError if the secret cannot be used.
TESSERA_API c10::intrusive_ptr<c10d::Store> connect_store(const Environment& environment,
                                                          std::chrono::milliseconds timeout);

}  // namespace tessera::comm
