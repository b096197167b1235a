// tests/faults/worker/short_jobs.h — jobs by the thousand: their ranks are forked from one process.
//
// That process has everything loaded and uses none of it, so a job begins in milliseconds instead
// of seconds. The store is a child of it, as it is of a launcher.

#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "report.h"

namespace tessera::faults {

/// One job that runs. Kills what is left of it when it goes.
class ShortJob {
 public:
  ShortJob() = default;
  ShortJob(ShortJob&&) = default;
  ShortJob& operator=(ShortJob&&) = delete;
  ~ShortJob();

  pid_t pid(int rank) const { return ranks_[static_cast<std::size_t>(rank)].pid; }
  int size() const { return static_cast<int>(ranks_.size()); }
  /// The first report of that kind by each of these ranks, in their order; null for a rank that
  /// ended or took longer than `limit`.
  std::vector<Json> await(const std::string& event, const std::vector<int>& ranks,
                          std::chrono::milliseconds limit);
  /// Kills a rank; returns when, by the clock of the reports.
  std::int64_t kill(int rank) const;
  /// The exit status of every rank, as waitpid gives it; kills those that take longer than `limit`.
  std::vector<int> wait(std::chrono::milliseconds limit);

 private:
  friend class ShortJobs;
  struct Rank {
    pid_t pid = -1;
    int reports = -1;
    std::string unread;
    std::vector<Json> said;
  };
  std::vector<Rank> ranks_;
};

class ShortJobs {
 public:
  ShortJobs();
  ~ShortJobs();
  ShortJobs(const ShortJobs&) = delete;
  ShortJobs& operator=(const ShortJobs&) = delete;

  /// Starts `size` ranks. In each of them `body` runs in the environment of a rank, and the process
  /// ends with what it returns. An exception that leaves it is reported as "error", and ends it
  /// too.
  ShortJob start(int size, const std::function<int()>& body);

 private:
  std::string folder_;
  pid_t store_ = -1;
  int num_started_ = 0;
};

/// In a rank: waits until somebody has written this key to the jobs' store.
void await_on_store(const std::string& key);

/// Tells the one who started the job. One line, one write.
void tell(const std::string& event, Json fields = Json::object());

}  // namespace tessera::faults
