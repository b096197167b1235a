// launch/rank_group.h — the ranks of one host during one attempt.

#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "environment.h"
#include "event_loop.h"
#include "guard.h"
#include "output.h"
#include "process.h"
#include "program.h"
#include "ranks.h"
#include "tessera/launch/failure.h"
#include "tessera/launch/options.h"

namespace tessera::launch {

/// Starts the ranks, follows their ends, and stops them when told to. Gone means: every rank has
/// been reaped and no process it has started is left.
class RankGroup final : public Ranks {
 public:
  RankGroup(EventLoop& loop, Guard& guard, const SignalState& signals, const RunOptions& options,
            Console& out, Console& err, Events events);
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;
  ~RankGroup() override;

  /// Starts all ranks. `folder` gets one folder per rank; `keep_files` says whether it outlives the
  /// job. Throws LaunchError if a rank cannot be started.
  void start(const Program& program, const Attempt& attempt, const std::string& folder,
             bool keep_files);

  /// Takes note of a reaped child, a rank or one that a rank has left behind. `helpers` are the
  /// launcher's own children, which do not keep the group alive.
  void on_child_exit(pid_t pid, int status, const std::set<pid_t>& helpers);

  void stop(std::chrono::milliseconds grace) override;
  void forward(int signal_number) override;
  void kill_all() override;
  bool is_gone() const noexcept override { return is_gone_; }
  std::vector<RankFailure> failures() const override;
  const std::vector<int>& killed_ranks() const noexcept override { return killed_ranks_; }

  /// Returns the processes of the ranks, by local rank.
  std::vector<pid_t> pids() const;

 private:
  struct Rank {
    int local_rank = 0;
    pid_t pid = -1;
    bool has_ended = false;
    bool was_stopped = false;
    bool group_is_empty = false;
    int status = 0;
    int64_t ended_ns = 0;
    int order = 0;
    std::string error_file;
    std::unique_ptr<RankStream> out;
    std::unique_ptr<RankStream> err;
  };

  void start_rank(Rank& rank, const Program& program, const Attempt& attempt,
                  const std::string& folder);
  std::unique_ptr<RankStream> open_stream(int local_rank, int bit, Console& console,
                                          const std::string& folder, FileDescriptor& write_end);
  void forget_empty_groups();
  void check_gone();
  void finish();
  void arm_kill(std::chrono::milliseconds delay);
  void terminate_left_behind();
  RankFailure describe(const Rank& rank) const;

  EventLoop& loop_;
  Guard& guard_;
  const SignalState& signals_;
  const RunOptions& options_;
  Console& out_;
  Console& err_;
  Events events_;
  std::vector<Rank> ranks_;
  bool keep_files_ = false;
  bool has_failed_ = false;
  bool is_stopping_ = false;
  bool is_killing_ = false;
  bool is_gone_ = false;
  int num_ended_ = 0;
  std::set<pid_t> helpers_;
  std::set<pid_t> told_to_end_;  // processes left behind that got SIGTERM
  std::vector<int> killed_ranks_;
  EventLoop::TimerId grace_timer_ = 0;
  EventLoop::TimerId kill_timer_ = 0;
  EventLoop::TimerId give_up_timer_ = 0;
};

}  // namespace tessera::launch
