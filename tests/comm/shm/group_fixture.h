// tests/comm/shm/group_fixture.h — runs the ranks of a group as threads or as processes.

#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "comm/shm/shm_transport.h"

namespace tessera::comm::shm::testing {

/// A directory of its own, removed with all it holds.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }
  /// Names of the entries.
  std::vector<std::string> entries() const;

 private:
  std::string path_;
};

/// Keys as files, for threads and processes alike.
class FileBootstrap : public Bootstrap {
 public:
  explicit FileBootstrap(std::string directory) : directory_(std::move(directory)) {}
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Clock::time_point deadline) override;

 private:
  std::string path_of(const std::string& key) const;
  std::string directory_;
};

/// Ends a wait when a process of the group has ended, or after `limit`.
class TestMonitor : public WaitMonitor {
 public:
  explicit TestMonitor(std::chrono::milliseconds limit = std::chrono::seconds(20))
      : limit_(limit) {}
  void watch(std::vector<pid_t> pids) { pids_ = std::move(pids); }
  void check(const Call& call, std::span<const int> missing, Clock::duration waited) override;
  void check_creation(std::span<const int> missing) override;

 private:
  bool has_ended(int rank) const;
  std::chrono::milliseconds limit_;
  std::vector<pid_t> pids_;
};

using RankBody = std::function<void(ShmTransport&)>;

/// Runs `body` on every rank, each a thread. Rethrows the failure of the lowest rank that has one.
void run_threads(int size, const ShmOptions& options, const RankBody& body);

/// As run_threads, but returns what each rank threw: "" or the text.
std::vector<std::string> texts_of_threads(int size, const ShmOptions& options,
                                          const RankBody& body);

/// What became of a rank that ran as a process.
struct Outcome {
  bool was_killed = false;  // by a signal
  std::string text;         // what it threw, or ""
  double seconds = 0.0;     // from the start of the body to its end
};

/// Runs `body` on every rank, each a process that watches the others; before that `prepare`, when
/// all know each other but there is no group yet.
std::vector<Outcome> run_processes(
    int size, const ShmOptions& options, const RankBody& body,
    const std::function<void(int rank, Bootstrap& bootstrap)>& prepare = nullptr);

/// A call with its deadline ten seconds from now.
Call call_of(Operator op, DataType dtype = DataType::kFloat32, std::optional<ReduceOp> reduce = {},
             int root = -1, std::uint64_t sequence = 1);

/// Small rings and slots, so that a few kilobytes pass through many chunks.
ShmOptions small_options();

}  // namespace tessera::comm::shm::testing
