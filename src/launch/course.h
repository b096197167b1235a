// launch/course.h — what a launcher decides: when ranks start, stop, start again, and how the job
// ends, from what its ranks and the launchers of the other hosts do.
//
// Free of processes, files and signals, which are its host's: the simulator runs the same
// decisions.

#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/secret.h"
#include "environment.h"
#include "event_loop.h"
#include "ranks.h"
#include "rendezvous.h"
#include "socket.h"
#include "tessera/launch/failure.h"
#include "tessera/launch/launch_error.h"
#include "tessera/launch/options.h"

namespace tessera::launch {

/// What the decisions are carried out by.
class CourseHost {
 public:
  CourseHost() = default;
  CourseHost(const CourseHost&) = delete;
  CourseHost& operator=(const CourseHost&) = delete;
  virtual ~CourseHost() = default;

  /// On node 0, before an attempt: lets the stores listen and writes down where. `meeting` is where
  /// the launchers met; null on one host. Throws LaunchError.
  virtual void open_stores(Attempt& attempt, const SocketAddress* meeting) = 0;
  /// Starts the ranks of this host. Throws LaunchError if one cannot be started, and leaves none.
  virtual std::unique_ptr<Ranks> start_ranks(Attempt& attempt, Ranks::Events events) = 0;
  /// Whether the ranks may have more to say once one of them has failed.
  virtual bool may_report() const = 0;
  /// One line for people.
  virtual void note(const std::string& line) = 0;
  /// The report of a job that failed.
  virtual void report(const std::vector<RankFailure>& failures, const Attempt& attempt) = 0;
};

/// One host's part of the job. Node 0 decides (starts, restarts, ends); the others follow.
class Course {
 public:
  /// `attempt` holds what all attempts share. All references must outlive it.
  Course(CourseHost& host, EventLoop& loop, Wire& wire, const RunOptions& options,
         const core::Secret& secret, Attempt attempt);
  Course(const Course&) = delete;
  Course& operator=(const Course&) = delete;
  ~Course();

  /// Starts the ranks, or looks for the other hosts first.
  void begin();
  /// The user, or who else may send signals, wants the job to end.
  void on_signal(int number);

  /// On node 0: ends the job at once, on all hosts.
  void fail(const LaunchError& error);

  /// On node 0: whether another host of the job has this address.
  bool has_host(const std::string& host) const {
    return coordinator_ && coordinator_->has_host(host);
  }

  bool is_over() const noexcept { return exit_code_ || error_; }
  /// How it ended: one of them, once it is over.
  const std::optional<int>& exit_code() const noexcept { return exit_code_; }
  const std::optional<LaunchError>& error() const noexcept { return error_; }
  /// Whether the other hosts have not got everything yet.
  bool has_unsent() const;

 private:
  bool leads() const { return options_.node_rank == 0; }

  void join_other_nodes();
  void on_member_message(int node, const Message& message);
  void on_member_lost(int node, const std::string& why);
  void on_leader_message(const Message& message);
  void obey(const Message& message);
  void on_leader_lost(const std::string& why);

  void start_attempt(int number);
  void start_ranks();
  void on_local_failure();
  void on_local_gone();
  void stop_everywhere();
  void on_node_gone(int node, std::vector<RankFailure> failures);
  void decide();
  void finish(int code);
  int code_after_signal() const;
  std::chrono::milliseconds grace() const;

  CourseHost& host_;
  EventLoop& loop_;
  Wire& wire_;
  const RunOptions& options_;
  const core::Secret& secret_;
  Attempt attempt_;
  std::unique_ptr<Ranks> ranks_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Member> member_;

  std::set<int> gone_nodes_;
  std::set<int> lost_nodes_;
  std::vector<RankFailure> failures_;
  bool is_stopping_ = false;
  int stop_signal_ = 0;  // the first signal the job was told to end by
  EventLoop::TimerId next_attempt_ = 0;
  std::optional<int> exit_code_;
  std::optional<LaunchError> error_;
};

}  // namespace tessera::launch
