// checkpoint/job.h — who saves: so that one job does not replace what another has saved.

#pragma once

#include <cstdint>
#include <string>

#include "tessera/checkpoint/disk.h"

namespace tessera::checkpoint {

/// The name of this job: the same for all processes and restarts of one run of the launcher, and of
/// this process alone without one.
std::string this_job();

/// The last commit that was in `root` when this process read from it, 0 if it never did.
std::int64_t read_until(const std::string& root);

/// 16 random hexadecimal digits.
std::string random_digits(Disk& disk = Disk::real());

}  // namespace tessera::checkpoint
