// tessera/launch/failure.h — who failed first, and how to say so.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::launch {

/// How one rank ended, when it did not end well.
struct RankFailure {
  int rank = -1;  // -1: not a rank but the launcher of a node
  int node = 0;
  std::string host;
  int64_t pid = 0;
  int exit_code = 0;      // meaningful if signal_number is 0
  int signal_number = 0;  // the signal that ended the process, or 0
  int64_t ended_ns = 0;   // when the launcher saw it end; nanoseconds since 1970
  int order = 0;          // position in the order of ends seen on its host

  bool was_stopped = false;  // the launcher had told it to stop before it ended

  bool has_error_file = false;
  int64_t error_ns = 0;       // when the error was raised, by the rank's own word
  bool is_secondary = false;  // reports the failure of a peer
  std::string message;        // of the error file, else the last line of stderr; may be empty
  std::string callstack;
  std::string error_file;  // path, empty if the file was not kept
  std::string tail;        // the last lines of stderr, if the console has not shown them
};

/// Reads the file written by `core::write_error_file` or by torch's own `record` into `failure`.
/// Returns false, and changes nothing, if the file is absent, too large or not understood.
bool read_error_file(const std::string& path, RankFailure& failure);

/// Returns the position of the root cause: a rank that failed by itself before one that reports a
/// peer, then the earliest. `failures` must not be empty.
size_t root_cause(const std::vector<RankFailure>& failures);

/// Returns the exit code the job ends with because of this failure.
int exit_code_of(const RankFailure& failure);

/// Returns `exit code 3` or `SIGKILL`.
std::string how_ended(const RankFailure& failure);

/// What the report says about the job around the failures.
struct ReportContext {
  int world_size = 1;
  int attempt = 0;
  int max_restarts = 0;
  int num_nodes = 1;
  bool memory_kill_seen = false;  // the kernel's out-of-memory killer was active meanwhile
  bool can_keep_output = true;    // the command line knows --log-dir
  bool use_color = false;
  int width = 100;
};

/// Returns the report for people: the root cause in three lines, then one line per failed rank.
std::string format_report(const std::vector<RankFailure>& failures, const ReportContext& context);

/// Returns the same as one JSON object on one line.
std::string format_report_json(const std::vector<RankFailure>& failures,
                               const ReportContext& context);

/// Text form of a list of failures, for the wire between launchers.
std::string failures_to_json(const std::vector<RankFailure>& failures);
std::vector<RankFailure> failures_from_json(const std::string& text);

}  // namespace tessera::launch
