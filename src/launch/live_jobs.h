// launch/live_jobs.h — which jobs of this user run on this host.
//
// A launcher writes a small file into its scratch folder; a folder whose launcher lives is a job.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::launch {

/// One launcher and its ranks.
struct LiveJob {
  std::string name;  // --rdzv-id, or a name made from the time
  int64_t pid = 0;   // of the launcher
  int64_t begin_ns = 0;
  int num_local_ranks = 0;
  int num_nodes = 1;
  int node_rank = 0;
  int attempt = 0;
  std::vector<std::string> command;
  std::string live_folder;    // where the ranks say what they are doing; empty before they start
  std::vector<int64_t> pids;  // of the ranks here, in order
};

/// Writes or replaces the record in `folder`. A full disk costs the job its line, nothing else.
void record_job(const std::string& folder, const LiveJob& job);

/// Returns the jobs whose launchers live, oldest first.
std::vector<LiveJob> live_jobs();

}  // namespace tessera::launch
