// launch/secret.h — where the secret of a job comes from and how the ranks get it.

#pragma once

#include <string>

#include "core/secret.h"
#include "tessera/launch/options.h"

namespace tessera::launch {

/// Returns what the launchers of this job prove to each other: --secret-file, the environment's, or
/// on one host a new one. Throws LaunchError if it cannot be used, or if several hosts have none
/// and were not told to go without.
core::Secret launcher_secret(const RunOptions& options);

/// Writes the secret of one run to `folder`, for its ranks alone; returns the path.
std::string write_rank_secret(const std::string& folder, const core::Secret& secret);

}  // namespace tessera::launch
