// src/comm/monitor.h — decides when a wait for other ranks has to end.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/member.h"
#include "comm/transport.h"

namespace tessera::comm {

/// Watches the members of one group on behalf of one rank. Safe to share between threads.
class GroupMonitor final : public WaitMonitor {
 public:
  /// Asks for a failure that arrived by a way the transport does not see; called while waiting.
  using FailurePoll = std::function<std::optional<Failure>()>;

  GroupMonitor(std::vector<Member> members, int rank, std::string group_name);
  ~GroupMonitor() override;
  GroupMonitor(const GroupMonitor&) = delete;
  GroupMonitor& operator=(const GroupMonitor&) = delete;

  /// Throws Failure when a missing rank's process has ended, when the poll brings a failure, when
  /// the wait was cancelled, or when the deadline has passed. Warns once per call after 5 s.
  void check(const Call& call, std::span<const int> missing, Clock::duration waited) override;

  /// As check, without looking for dead processes.
  void check_limits(const Call& call, std::span<const int> missing, Clock::duration waited);

  /// The first member other than this rank whose process on this host has ended, if any.
  std::optional<int> find_dead() const;

  /// Root-cause text for a rank that died during `call`.
  Failure death_of(const Call& call, int group_rank) const;
  /// "comm.all_reduce #118".
  static std::string title(const Call& call);
  /// "(float32 [4096], group 'graph', step 17)".
  std::string details(const Call& call) const;

  /// Ends every wait of this rank: its group is being destroyed.
  void cancel() noexcept { cancelled_.store(true, std::memory_order_release); }
  void set_poll(FailurePoll poll) { poll_ = std::move(poll); }

  const std::vector<Member>& members() const noexcept { return members_; }
  const std::string& group_name() const noexcept { return group_name_; }
  int rank() const noexcept { return rank_; }

 private:
  bool is_dead(int group_rank) const;
  std::string whereabouts(std::span<const int> missing) const;

  std::vector<Member> members_;
  int rank_;
  std::string group_name_;
  std::vector<int>
      pidfds_;  // -1: not a process of this host, or this process itself; -2: dead already
  FailurePoll poll_;
  std::atomic<bool> cancelled_{false};
  std::atomic<std::uint64_t> warned_sequence_{UINT64_MAX};
};

/// The step named by comm::set_step, -1 if none.
std::int64_t current_step() noexcept;

}  // namespace tessera::comm
