// report/rank_log.h — what the ranks of a job know each for itself, brought into one run folder.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "report/run_folder.h"
#include "tessera/comm/group.h"
#include "tessera/core/step_recorder.h"

namespace tessera::workloads::report {

/// Every rank's text, on every rank. Collective.
std::vector<std::string> gather_texts(const std::string& text, const comm::Group& group);

/// The most memory this process has had, in bytes; 0 where the system does not say.
std::int64_t peak_memory_bytes();

/// Writes trace.json and adds a breakdown line per rank, from the recorders of all ranks. `metrics`
/// is rank 0's, null on others. Collective; `folder` matters on rank 0.
void write_times(const std::string& folder, const core::StepRecorder& recorder,
                 const comm::Group& group, MetricsFile* metrics);

}  // namespace tessera::workloads::report
