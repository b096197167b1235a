// launch/environment.h — the variables by which a rank knows its place.

#pragma once

#include <string>
#include <vector>

#include "tessera/launch/options.h"

namespace tessera::launch {

/// What all ranks of one attempt share.
struct Attempt {
  int number = 0;
  std::string master_address;
  uint16_t master_port = 0;
  std::string run_id;       // unguessable, the same on all hosts
  std::string job_name;     // --rdzv-id, or a name made from the time
  std::string folder;       // of this run inside the log folder
  std::string secret_file;  // of this run, for its ranks
  std::string store;        // where the job's own store listens: unix:PATH or tcp:HOST:PORT
  std::string live_folder;  // of this host: where its ranks say what they are doing; may be empty
};

/// Returns the launcher's own environment with the variables of torchrun's contract and
/// TESSERA_RUN_ID set for one rank, and without TESSERA_JOB_SECRET, which is the launcher's alone.
std::vector<std::string> rank_environment(const RunOptions& options, const Attempt& attempt,
                                          int local_rank, const std::string& error_file);

/// Returns `num_bytes` random bytes as lower-case hexadecimal.
std::string random_hex(size_t num_bytes);

}  // namespace tessera::launch
