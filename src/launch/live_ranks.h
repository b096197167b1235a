// launch/live_ranks.h — what the ranks of a running job are doing, seen from outside.
//
// Reads the records that ranks keep (core/live_record.h) and /proc. No rank is asked or stopped,
// except for stacks.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "live_jobs.h"

namespace tessera::launch {

/// An operation of a group, under way or the last one.
struct RankOperation {
  std::string group;
  std::string operation;  // "all_reduce"; "send" and "recv" for messages
  std::string details;    // "float32 [4096]", once it has waited for a moment
  uint64_t sequence = 0;
  bool is_under_way = false;
  double seconds = 0;            // since it began, or since it ended
  std::vector<int> waiting_for;  // world ranks, at most the first eight
  int num_waiting_for = 0;       // of all
};

struct ThreadStack {
  int64_t thread = 0;
  std::string name;    // of the thread
  std::string frames;  // one a line; empty if it did not answer
};

struct LiveRank {
  int rank = 0;
  int64_t pid = 0;          // of the process that is the rank, or of what was started for it
  bool is_there = false;    // whether such a process lives
  bool has_record = false;  // false: it has not made a group, or its program does not use Tessera
  char state = '\0';        // as /proc says: R, S, D, T, Z
  int64_t step = -1;
  double step_seconds = 0;                // since it was named
  std::vector<RankOperation> operations;  // under way first, then by age
  int64_t memory_bytes = 0;               // resident
  int64_t shared_bytes = 0;               // of these, shared memory
  int64_t peak_bytes = 0;
  int num_threads = 0;
  double cpu_seconds = 0;
  std::vector<ThreadStack> stacks;
  std::string python_stacks;
};

/// Looks at the ranks of `job` on this host.
std::vector<LiveRank> look_at_ranks(const LiveJob& job);

/// Asks a rank for the stacks of its threads, and of Python if it runs it. A rank that does not
/// catch the signal is not sent one. Waits for at most a second.
void ask_for_stacks(const LiveJob& job, LiveRank& rank);

}  // namespace tessera::launch
