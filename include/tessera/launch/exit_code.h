// tessera/launch/exit_code.h — the numbers a finished job answers with.
//
// A rank's own code passes through unchanged; the codes below are the launcher's.

#pragma once

#include "tessera/core/exit_code.h"

namespace tessera::launch {

using core::exit_code_of_signal;
using core::kExitConfiguration;
using core::kExitData;
using core::kExitInternal;
using core::kExitLostPeer;
using core::kExitNotExecutable;
using core::kExitNotFound;
using core::kExitOk;
using core::kExitRendezvous;
using core::kExitUsage;

}  // namespace tessera::launch
