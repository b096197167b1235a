// report/trace.h — traces of ranks, as Perfetto and chrome://tracing read them: put together on one
// clock, and summed up.
//
// Read are the traces of a run folder and those that torch.profiler exports, one file per rank or
// several ranks in one file.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "report/run_folder.h"

namespace tessera::workloads::report {

/// What one rank noted. Times are microseconds; the clock of a trace begins where the earliest file
/// says that its own does.
struct RankTrace {
  int rank = 0;
  std::string path;
  std::vector<nlohmann::ordered_json> events;
};

/// Reads files, or folders: a folder's trace.json, else all .json files in it. The rank is what the
/// file says of itself, else the number after "rank" in its name, else its place among the files.
/// Throws Error naming the file and the cause, also for a rank that is there twice. Sorted by rank.
std::vector<RankTrace> read_traces(const std::vector<std::string>& paths);

/// One trace with a row of processes per rank, called "rank 0" and so on; time begins at 0. If
/// `align` is not empty, the clocks of ranks are moved so that the first span of this name ends on
/// all of them at once, as a collective does: for hosts whose clocks differ. Throws Error if a rank
/// has no such span.
nlohmann::ordered_json merge_traces(const std::vector<RankTrace>& traces, const std::string& align);

/// Time of spans, in microseconds, without the spans inside them.
struct SpanTime {
  std::int64_t count = 0;
  double total = 0;
  double waited = 0;  // of it, waiting for communication
};

/// The busiest thread of a rank, from its first span to the end of its last.
struct RankSummary {
  int rank = 0;
  std::int64_t num_steps = 0;  // 0: the trace does not tell steps apart
  double time = 0;             // from the first span to the end of the last
  double waited = 0;
  double idle = 0;  // covered by no span
  std::map<std::string, SpanTime> groups;

  /// Neither waiting nor idle.
  double busy() const noexcept { return time - waited - idle; }
};

enum class SpanGroup : std::uint8_t { kPhase, kName };

/// A span's phase is its category. It waits if it says so ("wait" of its arguments), or if it is a
/// collective of c10d, Gloo or NCCL. Ranks without spans are an Error.
std::vector<RankSummary> summarize(const std::vector<RankTrace>& traces, SpanGroup by);

}  // namespace tessera::workloads::report
