// src/comm/own_process.h — which process this is, known without a system call.

#pragma once

#include <sys/types.h>

namespace tessera::comm {

/// The number of the calling process. Right in forked children too, which is what it is for: what a
/// child inherits belongs to its parent.
pid_t own_pid() noexcept;

}  // namespace tessera::comm
