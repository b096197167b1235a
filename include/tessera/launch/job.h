// tessera/launch/job.h — start ranks, watch them, restart them.
//
// The launcher is one thread in a small process without LibTorch, so that it may fork at any time
// and is quick to start.

#pragma once

#include "tessera/launch/options.h"

namespace tessera::launch {

/// Runs the job to its end and returns the exit code of the program: 0, the code of the rank that
/// failed first, 128+n for a signal, or one of `exit_code.h`.
///
/// Takes over the process: signal mask, SIGPIPE, children and, while ranks run, stdout and stderr.
/// Call it once, from a process with one thread. Throws LaunchError when no rank could be started.
int run_job(const RunOptions& options);

}  // namespace tessera::launch
